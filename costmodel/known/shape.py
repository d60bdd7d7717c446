"""The sizes of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import UsageError, unknown

POSITIONS = ("learned", "rotary", "rotary-unfused", "alibi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer: sizes in elements. `ffn` is the width of the feed-forward part (of each expert, where there are `experts`).

    `gated`: SwiGLU with three matrices instead of two. `expert_every`: every so many layers is one of experts, each token going to
    `top_k` of them; `capacity`: rows that the experts compute, as a multiple of tokens times `top_k`. `dropout`: applied or not.
    `gathered_logits`: the loss is computed on the logits of the whole vocabulary. `shared_input`: the two products of a gated feed-forward
    part take their input through one redistribution, or each through its own.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = False
    experts: int = 0
    top_k: int = 2
    expert_every: int = 1
    capacity: float = 1.0
    tied: bool = True
    bias: bool = True
    dropout: bool = True
    norm: str = "layer_norm"
    position: str = "learned"
    gathered_logits: bool = False
    shared_input: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise UsageError(f"a transformer's {name} must be at least 1, not {getattr(self, name)}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads must divide hidden {self.hidden} and be a multiple of kv_heads {self.kv_heads}")
        if self.position not in POSITIONS:
            raise UsageError(unknown("position", self.position, POSITIONS))

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads
