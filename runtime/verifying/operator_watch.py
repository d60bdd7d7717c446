"""Watches every operator on DTensors: its joined shards must equal its result on the whole inputs.

    error = max | together(op(shards)) - op(together(shards)) |
            / max(1e-3, max | op(together(shards)) |)

An operator with wrong inputs is judged by these inputs, so each operator answers for itself alone.
If an operator draws random numbers, shards must draw different ones, and replicas the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
SMALL = 1e-3
"""Below this magnitude, differences are absolute, not relative to the largest value."""
DRAWN = 16
"""Numbers from which on equal draws are no accident."""
_RANDOM = re.compile(
    r"(?!.*backward)(?:\w*dropout|bernoulli_?|rand\w*|normal_?|uniform_?|multinomial"
    r"|exponential_|geometric_|cauchy_|log_normal_|random_|rrelu\w*)"
)
MASKS = {"aten.native_dropout.default": 1, "aten._fused_dropout.default": 1}
"""The output with the drawn numbers, if it is not the first."""


IN_REGION = (
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    "aten._log_softmax_backward_data.default",
)
"""Operators that compute something else in a loss_parallel region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of an operator (or of a parameter's gradient): where, in which shape, by how much."""

    operator: str
    where: str
    shape: tuple[int, ...]
    layouts: str
    error: float
    what: str

    @property
    def sentence(self) -> str:
        """The finding in words."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        size = f", off by {self.error:.3g}" if self.error else ""
        where = f" in {self.where}" if self.where else ""
        layouts = f"; {self.layouts}" if self.layouts else ""
        return f"{self.operator}{where} ({shape}{layouts}): {self.what}{size}"


@dataclass
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that collects findings while entered.

    `checked` counts operators, `random` those that drew random numbers; `running` is the last
    operator.
    """

    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    checked: int = 0
    random: int = 0
    running: str = ""
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
        name = str(func)
        # DTensor's own collectives work on shards, whose results are no parts of a whole.
        if not inputs or name.startswith(("_c10d", "c10d")):
            self.random += is_random(name)
            return func(*args, **kwargs)
        self.running = name
        # Joined before the operator runs, which may change its inputs in place.
        whole = tree_map_only(DTensor, together, (args, kwargs))
        result = func(*args, **kwargs)
        self._check(name, func, whole, result, inputs)
        return result

    def _check(
        self, name: str, func: Any, whole: Any, result: Any, inputs: Sequence[DTensor]
    ) -> None:
        """Compare an operator's result with that on the whole inputs."""
        self.checked += 1
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        layouts = ", ".join(layout_of(value) for value in inputs)
        if is_random(name):
            self.random += 1
            # Values differ wherever their inputs do, so the numbers are read off the mask.
            drawn = outputs[min(MASKS.get(name, 0), len(outputs) - 1)] if outputs else None
            if isinstance(drawn, DTensor) and (said := draws(drawn)):
                self._note(name, drawn, layouts, 0.0, said)
            return
        # Undefined values, such as those of empty(), cannot be compared. The two backward operators
        # of a loss_parallel region divide their work differently from the whole: errors show in the
        # parameters' gradients.
        if "empty" in name or (name in IN_REGION and any(_by_classes(value) for value in inputs)):
            return
        results = tree_leaves(func(*whole[0], **whole[1]))
        wanted = [value for value in results if isinstance(value, Tensor)]
        for value, right in zip(outputs, wanted, strict=False):
            joined = together(value) if isinstance(value, DTensor) else value
            if joined.shape != right.shape:
                fault = f"its shards make {'x'.join(map(str, joined.shape))}"
                self._note(name, right, layouts, 0.0, fault)
            elif not close(joined, right):
                fault = "the shards put together are not what the whole gives"
                self._note(name, right, layouts, difference(joined, right), fault)

    def _where(self) -> str:
        """The running module, or the backward pass."""
        if self.stack:
            return self.stack[-1]
        return "" if torch._C._current_autograd_node() is None else "the backward pass"

    def _note(self, name: str, tensor: Tensor, layouts: str, error: float, what: str) -> None:
        """Note a finding; of equal ones at one place the largest error."""
        where = self._where()
        key = (name, where, what)
        # An operator in a loop would fill the report with one fault.
        if key not in self.findings or self.findings[key].error < error:
            self.findings[key] = Finding(
                operator=name,
                where=where,
                shape=tuple(tensor.shape),
                layouts=layouts,
                error=error,
                what=what,
            )

    def named(self, module: nn.Module) -> None:
        """Track the running module, for messages about operators."""
        for name, inner in module.named_modules():
            if name:
                inner.register_forward_pre_hook(
                    lambda *_, n=name: self.stack.append(n), prepend=True
                )
                # A hook that returns something would replace the module's output.
                inner.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True)


def is_random(name: str) -> bool:
    """Whether an operator draws numbers.

    >>> is_random("aten.native_dropout.default")
    True
    >>> is_random("aten.native_dropout_backward.default"), is_random("aten.operand.default")
    (False, False)
    """
    return _RANDOM.fullmatch(name.split(".")[1] if name.count(".") > 1 else name) is not None


def together(value: DTensor) -> Tensor:
    """The whole tensor of which the shards are parts or addends."""
    # Below autograd torch 2.11 cannot gather a DTensor that requires a gradient.
    constant: Any = value.detach()
    whole: Tensor = constant.full_tensor()
    return whole.clone()


def _by_classes(value: DTensor) -> bool:
    """Whether logits are split by classes."""
    return value.dim() > 0 and any(
        isinstance(p, Shard) and p.dim == min(1, value.dim() - 1) for p in value.placements
    )


def layout_of(value: DTensor) -> str:
    """The placements of a tensor, as autopar writes layouts."""
    return " ".join(map(_placement_text, value.placements))


def _placement_text(placement: Placement) -> str:
    """A placement, as autopar writes it."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return "P" if isinstance(placement, Partial) else str(placement)


def draws(value: DTensor) -> str:
    """The fault of the numbers that ranks drew; "" if there is none."""
    local = value.to_local().detach().to(torch.float64).contiguous()
    for dim, placement in enumerate(value.placements):
        group = value.device_mesh.get_group(dim)
        held = list(gathered(local, group))
        same = all(
            numbers.shape == local.shape and bool(torch.equal(numbers, held[0])) for numbers in held
        )
        # Few numbers, or constant ones (a rate of 0 or 1), may be equal by accident.
        telling = len(held) > 1 and local.numel() >= DRAWN and float(local.std()) > 0
        if isinstance(placement, Shard) and same and telling:
            return "every shard draws the same numbers"
        if isinstance(placement, Replicate) and not same:
            return "replicas draw different numbers"
    return ""


def gathered(local: Tensor, group: Any) -> Iterator[Tensor]:
    """The tensors of all ranks of a group."""
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, local, group=group)
    return iter(held)


def close(value: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if not (value.is_floating_point() or value.is_complex()):
        return bool(torch.equal(value, right))
    return difference(value, right) <= TOLERANCES.get(value.dtype, 1e-4)


def difference(value: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN equals NaN."""
    if not right.numel():
        return 0.0
    a, b = (tensor.detach().to(torch.float64) for tensor in (value, right))
    both = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(both.any()):
        return 0.0
    gap = (a - b)[both].abs().max()
    most = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else torch.tensor(0.0)
    return float(gap) / max(float(most), SMALL) if bool(gap.isfinite()) else float("inf")


def scaled_by(value: Tensor, right: Tensor) -> float | None:
    """The factor by which all of a tensor is too large, if there is one.

    A sum over ranks that is taken twice has such a factor.
    """
    a, b = (tensor.detach().to(torch.float64).flatten() for tensor in (value, right))
    square = float(b @ b)
    if square <= 0:
        return None
    ratio = float(a @ b) / square
    return ratio if difference(a, ratio * b) < 1e-3 and abs(ratio - 1) > 1e-3 else None
