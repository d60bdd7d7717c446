"""Collectives of splits in which rows travel between ranks: look-ups, fills, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES

from ..notation import ONCE
from ..rules import Call
from ..rules.experts import EXPERTS, per_token, result_of
from ..rules.gather_scatter import FILL_IN
from ..strategies import Strategies
from .moves import Floats, Move, Split
from .routing import domains_of_a_token

LOOK_UPS = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor"})
"""Operators whose `dispatch` brings the rows that an index names."""


def rows_travel(split: Split) -> list[Move]:
    """Exchanges of rows between ranks. Their number depends on data and is priced as if all ranks
    need equally many.

    - A look-up: the indices to all ranks, the rows to the ranks that asked, their gradients back.
    - A fill by a mask: the counts of all masks, the elements to their places.
    - A grouped product: the rows to the ranks of their experts, the results back.
    - A layer of experts: the row counts of each expert on every rank, then as a grouped product.
    """
    if split.call.operator.kind == EXPERTS:
        return _layer_of_experts(split)
    if split.call.operator.kind in LOOK_UPS:
        rows = split.output_elements() * DTYPE_BYTES[split.call.outputs[0].dtype]
        asked = split.input_bytes(1) * split.size
        forward = [
            Move(phase="forward", kind="all_gather", nbytes=asked),
            Move(phase="forward", kind="all_to_all", nbytes=rows),
        ]
        # Every rank still knows who asked for which rows, so indices do not travel again.
        return forward + [Move(phase="backward", kind="all_to_all", nbytes=rows)] * split.train
    if split.call.operator.kind == FILL_IN:
        # Eight bytes for each rank's number of places.
        counts = np.full(len(split.local), 8.0 * split.size)
        placed = split.input_bytes(2)
        return [
            Move(phase="forward", kind="all_gather", nbytes=counts),
            Move(phase="forward", kind="all_to_all", nbytes=placed),
        ] + [Move(phase="backward", kind="all_to_all", nbytes=placed)] * split.has_gradient(2)
    there = split.input_bytes(0)
    back = split.output_elements() * DTYPE_BYTES[split.call.outputs[0].dtype]
    phases = ("forward", "backward") if split.train else ("forward",)
    # Gradients take the rows' way: those of the results to the experts, those of the rows home.
    order = {"forward": (there, back), "backward": (back, there)}
    return [
        Move(phase=phase, kind="all_to_all", nbytes=nbytes)
        for phase in phases
        for nbytes in order[phase]
    ]


def _layer_of_experts(split: Split) -> list[Move]:
    """Rows go to their experts, results come back once: tokens x k x width / p, if p ranks share
    the experts.
    """
    call = split.call
    rows = _tokens(split) * per_token(call)
    there = rows * _row_bytes(split, 0)
    back = rows * result_of(call).width * DTYPE_BYTES[result_of(call).dtype]
    # Eight bytes for each rank's number of rows for each expert.
    counts = np.full(len(split.local), 8.0 * split.size * split.rule.factors[split.factor].size)
    forward = [Move(phase="forward", kind="all_gather", nbytes=counts)]
    forward += [Move(phase="forward", kind="all_to_all", nbytes=nbytes) for nbytes in (there, back)]
    backward = [Move(phase="backward", kind="all_to_all", nbytes=back)] * split.train
    # Whenever the layer is trained, the results' gradients go to the experts; those of the rows go
    # home only where they are wanted.
    return (
        forward
        + backward
        + [Move(phase="backward", kind="all_to_all", nbytes=there)] * split.has_gradient(0)
    )


def _tokens(split: Split) -> Floats:
    """Tokens of a rank. The width of the results is never split."""
    results = split.output_elements() / split.call.outputs[0].shape[1]
    return np.asarray(results * split.call.inputs[0].shape[0] / split.call.outputs[0].shape[0])


def _row_bytes(split: Split, index: int) -> int:
    tensor = split.call.inputs[index]
    return tensor.bytes // max(tensor.shape[0], 1)


def places_on_the_way(call: Call, strategies: Strategies, mesh: Sequence[int]) -> Floats:
    """Expected places to which a token's row goes once, on all axes together: array [strategies].

    0 where no row goes so.
    """
    once = np.array([option.communication == ONCE for option in strategies.options])
    sizes = np.where(once[strategies.choices], np.array(mesh, dtype=np.int64), 1)
    reached = sizes.cumprod(axis=1) * (sizes > 1)
    experts = strategies.rule.size_of(("e",))
    return np.asarray(_expected(reached, experts, per_token(call)).sum(axis=1))


def _expected(numbers: NDArray[Any], experts: int, per_token: int) -> Floats:
    """The expected number of so many places that have an expert of a token; of none, 0."""
    values, inverse = np.unique(numbers, return_inverse=True)
    each = [domains_of_a_token(experts, per_token, int(n)) if n else 0.0 for n in values]
    return np.asarray(np.array(each)[inverse].reshape(numbers.shape))


def rows_travel_once(split: Split) -> list[Move]:
    """Exchanges along one of the axes that a token's row takes in turn, from the outermost in.

    On each it goes once to every place where some of its experts are, from wherever it has come
    so far, with the numbers and scores of its k experts:

        rows of a rank = its tokens x the expected number of places (of this axis and those
                         outside) that have an expert of a token

    Back come as many partial sums of weighed results. Every choice is as likely as any other.
    """
    call = split.call
    k = per_token(call)
    experts = split.rule.factors[split.factor].size
    scores = len(call.inputs) - 1
    rows = _tokens(split) * _expected(split.outside * split.size, experts, k)
    # All tokens of the ranks outside may come here, and each go to k places or to all.
    most = _tokens(split) * split.outside * min(k, split.size)
    weights = k * _row_bytes(split, scores)
    numbers = 4 * k
    sums = call.outputs[0].bytes // max(call.outputs[0].shape[0], 1)
    wanted = split.has_gradient(0) * _row_bytes(split, 0) + split.has_gradient(scores) * weights

    def exchange(phase: str, nbytes: int, *, home: bool) -> Move:
        return Move(
            phase=phase,
            kind="all_to_all",
            nbytes=rows * nbytes,
            most=most * nbytes,
            home=home,
            outermost=split.outermost,
        )

    # Eight bytes for each rank's number of rows for each place.
    counts = np.full(len(split.local), 8.0 * split.size * split.size)
    return [
        Move(phase="forward", kind="all_gather", nbytes=counts),
        exchange("forward", _row_bytes(split, 0) + weights + numbers, home=False),
        exchange("forward", sums, home=True),
        *[exchange("backward", sums, home=False)] * split.train,
        *[exchange("backward", wanted, home=True)] * bool(wanted),
    ]
