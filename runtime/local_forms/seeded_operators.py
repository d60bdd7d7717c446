"""Operators with random draws inside, whole on every rank.

Torch's generator is set to a seed of operator and step, so that all ranks draw the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.errors import PlanError
from autopar.ir import Value
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.random_numbers.counter_bits import Key
from autopar.runtime.random_numbers.draw_state import Draws, current, operator_number


@contextlib.contextmanager
def torch_seeded(draws: Draws, operator: int, device: torch.device) -> Iterator[None]:
    """Let torch's draws on the device follow the operator's key; the generator is restored."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    before = generator.get_state()
    generator.manual_seed(Key.of(draws, operator).rows & (2**63 - 1))
    try:
        yield
    finally:
        generator.set_state(before)


def seeded(kind: str, operator: int, device: torch.device, **arguments: Any) -> Any:
    """Call the operator itself, with random numbers of its own."""
    function = function_of(kind)
    draws = current()
    inputs = arguments_of(function, arguments, (), device)
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    if draws.exact:
        return function(**inputs)
    with torch_seeded(draws, operator, tensors[0].device if tensors else device):
        return function(**inputs)


def drawing_inside(
    when: Callable[[Mapping[str, Value]], bool],
) -> Callable[[LocalCall], Mapping[str, Value] | None]:
    """The arguments of `seeded` for an operator whose attributes say that it draws."""

    def knows(call: LocalCall) -> Mapping[str, Value] | None:
        operator = call.operator
        if not when(operator.attributes):
            return None
        # Torch's own draws depend on the shape: a part of the output would be other numbers.
        if any(call.cuts(layout) for layout in call.decision.outputs):
            raise PlanError(
                f"operator {operator.name!r} ({operator.kind}) draws random numbers"
                " that cannot be drawn in parts"
            )
        return {"operator": operator_number(operator.name), "device": None}

    return knows


def _enter(kinds: str, when: Callable[[Mapping[str, Value]], bool]) -> None:
    for kind in kinds.split():
        register(kind, knows=drawing_inside(when), local=functools.partial(seeded, kind))


_enter(
    "aten.poisson.default aten.binomial.default aten.multinomial.default aten.randperm.default",
    lambda attributes: True,
)
_enter("aten.rrelu.default", lambda attributes: bool(attributes.get("training")))
_enter(
    "aten._scaled_dot_product_attention_math.default",
    lambda a: bool(a.get("dropout_p")) and a.get("dropout_mask") is None,
)
_enter(
    " ".join(
        f"aten.{name}.{form}"
        for name in ("lstm", "gru", "rnn_relu", "rnn_tanh")
        for form in ("input", "data")
    ),
    lambda attributes: bool(attributes.get("train")) and bool(attributes.get("dropout")),
)
