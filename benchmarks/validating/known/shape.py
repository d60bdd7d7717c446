"""The sizes of a transformer: dense or of experts, decoder, encoder or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopar.costmodel.frameworks import Framework
from autopar.errors import ModelError, UsageError, unknown

PATTERN = {"M": "state", "*": "attention alone", "E": "experts alone", "-": "dense alone"}
"""Layers that are one mixer with its residual, by their letter: state space, attention, experts,
feed-forward part.
"""
POSITIONS = ("none", "learned", "rotary", "rotary-unfused", "alibi")
NORMS = ("layer_norm", "rms_norm")
POSITIVE = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "sequence",
    "top_k",
    "expert_every",
)
NOT_NEGATIVE = (
    "head_size",
    "experts",
    "expert_ffn",
    "shared_ffn",
    "dense_layers",
    "window",
    "mtp",
    "encoder_layers",
    "patch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values are made of `kv_rank` elements of a token, queries of `q_rank` (0: of the hidden
    dim). In a head, queries and keys have `nope` elements without a position and `rope` with one
    (keys share the latter); values have `value`.
    """

    kv_rank: int
    rope: int
    nope: int
    value: int
    q_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """State-space layers (Mamba-2, arXiv:2405.21060).

    `heads` of `width` elements, in `groups` that share keys and queries of `size` elements, the dim
    of their states; scanned in chunks of `chunk` rows.
    """

    heads: int
    width: int
    size: int
    groups: int = 1
    chunk: int = 128

    def __post_init__(self) -> None:
        if (
            min(self.heads, self.width, self.size, self.groups, self.chunk) < 1
            or self.heads % self.groups
        ):
            raise UsageError(
                f"state-space layers need positive sizes, and {self.heads} heads in equal groups, "
                f"not {self.groups}"
            )

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer; sizes are in elements.

    Sizes:

    - `ffn`: width of a feed-forward part. `head_size` (0: hidden / heads).
    - `gated`: SwiGLU, with three matrices, not two. `latent`: latent attention.
    - `window`: keys that a query sees (0: all); every `full_every`-th layer sees all (0: none
      does).

    Experts:

    - `experts` to which the router sends tokens, `top_k` for each token, none dropped or padded.
    - `expert_ffn`: width of an expert (0: `ffn`). `shared_ffn`: width of the expert of every token
      (0: none).
    - `groups` of experts, of which `top_groups` are open to a token (0: no groups).
    - Layers of experts are every `expert_every`-th behind the first `dense_layers`.
    - `expert_hidden`: elements of a token's row for its experts (latent experts; 0: `hidden`).

    Layers:

    - `pattern`: layers of one mixer each, by the letters of `PATTERN`, some with `state`.
    - `mtp`: modules that predict further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2). Each
      has a layer (with a pattern: the layers of `mtp_pattern`) and a head.
    - `encoder_layers`, of `encoder_sequence` tokens (0: `sequence`), to which the decoder attends.

    Kind:

    - `causal`: false for an encoder alone.
    - `patch`: tokens are patches of images of `patch` squared pixels in three colours, and the head
      sees their mean.
    - `tied`: the head shares the embedding's table. `dropout`: applied or not.
    - `qk_norm`: queries and keys are normalised by head.
    - `gathered_logits`: the loss reads logits of the whole vocabulary.
    - `shared_input`: the two products of a gated feed-forward part share one redistribution of
      their input.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    head_size: int = 0
    gated: bool = False
    latent: Latent | None = None
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    groups: int = 0
    top_groups: int = 0
    expert_every: int = 1
    dense_layers: int = 0
    window: int = 0
    full_every: int = 0
    expert_hidden: int = 0
    pattern: str = ""
    state: StateSpace | None = None
    mtp: int = 0
    mtp_pattern: str = ""
    encoder_layers: int = 0
    encoder_sequence: int = 0
    causal: bool = True
    patch: int = 0
    tied: bool = True
    bias: bool = True
    qkv_bias: bool = False
    dropout: bool = True
    qk_norm: bool = False
    norm: str = "layer_norm"
    position: str = "learned"
    gathered_logits: bool = False
    shared_input: bool = True

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise UsageError(
                    f"a transformer's {name} must be at least 1, not {getattr(self, name)}"
                )
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UsageError(
                    f"a transformer's {name} must not be negative, but is {getattr(self, name)}"
                )
        if self.heads % self.kv_heads or (self.hidden % self.heads and not self.head_size):
            raise UsageError(
                f"{self.heads} heads must divide hidden {self.hidden} where no head_size is given, "
                "and be a multiple of "
                f"kv_heads {self.kv_heads}"
            )
        # The default of `top_k` may exceed the experts of a model that has none.
        if self.experts and self.top_k > self.experts:
            raise UsageError(f"a token cannot go to {self.top_k} of {self.experts} experts")
        self._check_pattern()
        if self.position not in POSITIONS:
            raise UsageError(unknown("position", self.position, POSITIONS))
        if self.norm not in NORMS:
            raise UsageError(unknown("norm", self.norm, NORMS))

    def _check_pattern(self) -> None:
        """Require that the letters of the layers are known, and their sizes given."""
        for letter in self.pattern + self.mtp_pattern:
            if letter not in PATTERN:
                raise UsageError(unknown("layer", letter, PATTERN))
        if self.pattern and len(self.pattern) != self.layers:
            raise UsageError(f"the pattern has {len(self.pattern)} layers, not {self.layers}")
        if "M" in self.pattern + self.mtp_pattern and self.state is None:
            raise UsageError("a pattern with state-space layers needs their sizes (state)")
        if "E" in self.pattern + self.mtp_pattern and not self.experts:
            raise UsageError("a pattern with layers of experts needs their number (experts)")

    @classmethod
    def of(cls, path: str | Path, *, sequence: int | None = None) -> Shape:
        """Return the shape in a Hugging Face `config.json`.

        `sequence`: length of sequences (default: the longest allowed).
        """
        from .huggingface import sizes_of

        given = sizes_of(path, sequence=sequence)
        latent = given.pop("latent", None)
        state = given.pop("state", None)
        try:
            return cls(
                **given,
                latent=Latent(**latent) if latent else None,
                state=StateSpace(**state) if state else None,
            )
        except UsageError as error:
            raise ModelError(f"{path}: {error}") from error

    def run_by(self, framework: Framework) -> Shape:
        """The shape as a framework computes it."""
        unfused = self.position == "rotary" and not framework.one_rotation
        return replace(
            self,
            position="rotary-unfused" if unfused else self.position,
            gathered_logits=framework.gathered_logits,
            shared_input=framework.shared_input,
        )

    @property
    def width(self) -> int:
        """Elements of one head."""
        return self.head_size or self.hidden // self.heads

    def kind(self, index: int) -> str:
        """Return the kind of the layer at `index`; layers of one kind are equal.

        >>> sizes = {"layers": 4, "hidden": 8, "heads": 1, "kv_heads": 1, "ffn": 8, "vocab": 8}
        >>> shape = Shape(**sizes, sequence=8, experts=4, dense_layers=1)
        >>> [shape.kind(i) for i in range(4)]
        ['dense', 'experts', 'experts', 'experts']
        """
        if self.pattern:
            return PATTERN[self.pattern[index]]
        # Periods end with the layer that differs: in a period of two it is the second.
        behind = index - self.dense_layers
        with_experts = bool(self.experts) and behind >= 0 and (behind + 1) % self.expert_every == 0
        whole = not self.window or (self.full_every > 0 and (index + 1) % self.full_every == 0)
        return ("experts" if with_experts else "dense") + ("" if whole else " windowed")

    def kinds(self) -> tuple[str, ...]:
        """The kinds of all layers, those of the encoder first."""
        return _kinds(self)


def _kinds(shape: Shape) -> tuple[str, ...]:
    return ("encoder",) * shape.encoder_layers + tuple(
        shape.kind(index) for index in range(shape.layers)
    )
