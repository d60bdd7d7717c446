"""Communication inside operators: the words after `:` in a rule, as a table.

An option with such a word is taken on one mesh axis, or on several that are one group (unless it
stacks, or does not join), and no other axis splits its factors. The exchanges of a group are those
of all its ranks at once, or go axis by axis, each in turn. Each word says which collectives
every rank issues, in order, as a function of the local sizes. `runtime/split_operators` holds the
local form under the same word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES

from ..mesh import Axes, axis_sets, degree_of
from ..notation import ONCE, Rule, local_elements
from ..rules import Call
from ..rules.experts import EXPERTS
from ..rules.gather_scatter import FILL_IN
from ..rules.recurrent import DELTA_RULE, STATE_SPACE
from ..rules.windows import window_index, windows_of
from ..strategies import Strategies
from .largest_elements import largest_traffic
from .moves import Floats, Move, Split
from .travelling_rows import rows_travel, rows_travel_once


def _unlimited(call: Call, rule: Rule, factor: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """A row of the table.

    `moves`: the collectives that every rank issues, in order. `limit`: the largest number of shards
    (0: any number, 1: no split). `beside`: whether the factors split alongside may be split on
    other axes too. `stacks`: whether the option can be taken on several axes, one after the other;
    `joins`: on several axes as one group, which exchanges axis by axis if they come `in_turn`.
    `visits`: whether every rank meets all shards of the factor in turn and does its local work once
    for each. `own`: whether parts of a batch that come
    one after the other may each do without, as the local form refuses data that would travel.
    """

    moves: Callable[[Split], Sequence[Move]]
    limit: Callable[[Call, Rule, int], int] = _unlimited
    stacks: bool = False
    joins: bool = True
    in_turn: bool = False
    visits: bool = False
    beside: Callable[[Call], bool] = lambda call: False
    own: Callable[[Call], bool] = lambda call: False

    @property
    def by_axis(self) -> bool:
        """Whether every axis has exchanges of its own."""
        return self.stacks or self.in_turn


def _statistics_itemsize(split: Split) -> int:
    """Half precision is summed in single."""
    return max(DTYPE_BYTES[split.call.inputs[0].dtype], 4)


def _vocabulary(split: Split) -> list[Move]:
    """All-reduces of each row's maximum, then of sums: exponentials, the target's score, its
    weight, mean score.
    """
    target = split.call.position("target")
    assert target is not None
    rows = sorted({f for dim in split.rule.inputs[target] for f in dim})
    nbytes = split.elements(*rows) * _statistics_itemsize(split)
    # Backward nothing: from the sums each rank knows the gradient of its own columns.
    return [
        Move(phase="forward", kind="all_reduce", nbytes=nbytes),
        Move(
            phase="forward",
            kind="all_reduce",
            nbytes=nbytes * class_loss_sums(split.call.operator.attributes, split.call),
        ),
    ]


def class_loss_sums(attributes: Mapping[str, Any], call: Call) -> int:
    """The number of sums over the classes that a split cross entropy needs for each row."""
    weighted = call.position("weight") is not None
    smoothed = bool(attributes.get("label_smoothing"))
    # Of exponentials, and the target's score; its weight; with smoothing the scores, and their
    # weights if there are any.
    return 2 + weighted + smoothed * (1 + weighted)


def _ring(split: Split) -> list[Move]:
    """Keys and values travel around the axis as one message; backward they do so again, and their
    gradients come home.

    Gradients of half precision are summed in single.
    """
    # Queries stay: they lack the keys' factor.
    places = [
        place
        for place, dims in enumerate(split.rule.inputs[:3])
        if any(split.factor in dim for dim in dims)
    ]
    both = sum((split.input_bytes(place) for place in places), np.zeros(len(split.local)))
    itemsize = DTYPE_BYTES[split.call.inputs[0].dtype]
    # Backward the gradients follow their block, so they make one move more, which brings them home.
    values = Move(phase="backward", kind="send", nbytes=both)
    summed = Move(phase="backward", kind="send", nbytes=both / itemsize * max(itemsize, 4))
    ahead = [replace(values, phase="forward")] * (split.size - 1)
    return [*ahead, *([values, summed] * (split.size - 1) + [summed]) * split.train]


def _prefix(split: Split) -> list[Move]:
    """The totals of all ranks; backward, of their gradients each takes the sum of its own."""
    if split.call.operator.kind in (DELTA_RULE, STATE_SPACE):
        elements = _passed_states(split)
        itemsize = max(DTYPE_BYTES[split.call.inputs[0].dtype], 4)
    else:
        others = [f for f in range(len(split.rule.factors)) if f != split.factor]
        elements = split.elements(*others)
        itemsize = DTYPE_BYTES[split.call.outputs[0].dtype]
    nbytes = elements * split.size * itemsize
    forward = [Move(phase="forward", kind="all_gather", nbytes=nbytes)]
    return forward + [Move(phase="backward", kind="reduce_scatter", nbytes=nbytes)] * split.train


def _passed_states(split: Split) -> Floats:
    """Elements of what each head of a rank makes of the state before it: [w, e] and what a state is
    multiplied by, a matrix [w, w] of delta rules and else a number, which takes a column.
    """
    of = {f.name: split.local[:, i] for i, f in enumerate(split.rule.factors)}
    ones = np.ones(len(split.local))
    heads = of.get("b", ones) * of.get("g", ones) * of.get("r", ones)
    width = of.get("w", ones)
    columns = width if split.call.operator.kind == DELTA_RULE else ones
    return np.asarray(heads * width * (of.get("e", ones) + columns))


def _halo(split: Split) -> list[Move]:
    """Border rows go to the neighbours; backward, the gradients of the received rows return.

    The spatial dims take turns in their order, so that the rows of a later dim hold the halo of the
    earlier dims.
    """
    windows = windows_of(split.call)
    dims = split.rule.inputs[0]
    space = len(windows)
    turn = window_index(split.rule.factors[split.factor].name)
    across = local_elements(dims[:-space], split.local) * DTYPE_BYTES[split.call.inputs[0].dtype]
    for index, (dim, window) in enumerate(zip(dims[-space:], windows, strict=True)):
        if index != turn:
            own = split.elements(*dim)
            # A dim of an earlier turn, if it is split, has grown by its border rows, and these
            # travel too.
            exchanged = (own < window.rows) & (index < turn and not window.apart)
            across = across * (own + np.where(exchanged, window.low + window.high, 0))
    phases = ("forward", "backward") if split.has_gradient(0) else ("forward",)
    # A negative number of rows means that a shard skips some of its own: nothing is sent.
    sent = [amount for amount in (windows[turn].low, windows[turn].high) if amount > 0]
    return [
        Move(phase=phase, kind="send", nbytes=across * amount)
        for phase in phases
        for amount in sent
    ]


def _halo_limit(call: Call, rule: Rule, factor: int) -> int:
    return max(1, windows_of(call)[window_index(rule.factors[factor].name)].most)


def _normalize(split: Split) -> list[Move]:
    """The rows' maxima and their sums of exponentials; backward one more sum over the rows."""
    rows = [f for f in range(len(split.rule.factors)) if f != split.factor]
    nbytes = split.elements(*rows) * max(DTYPE_BYTES[split.call.outputs[0].dtype], 4)
    phases = ("forward", "forward", "backward") if split.train else ("forward", "forward")
    return [Move(phase=phase, kind="all_reduce", nbytes=nbytes) for phase in phases]


def _statistics(split: Split) -> list[Move]:
    """The means and squared differences of all ranks; backward, two sums for each mean."""
    images, channels = split.rule.inputs[0][:2]
    # In batch norm (`BatchNormalization`, `batch_norm`) the images share the statistics of a
    # channel; in the others each image has its own.
    whole = "atch" in split.call.operator.kind
    # The outer term of the channels counts the groups, but one group is not spelled.
    groups = () if split.call.get("num_groups") == 1 else channels[:1]
    nbytes = (
        2
        * split.elements(*(channels if whole else (*images, *groups)))
        * _statistics_itemsize(split)
    )
    # An all-gather's size is what comes out of it, an all-reduce's its buffer.
    forward = [Move(phase="forward", kind="all_gather", nbytes=nbytes * split.size)]
    return forward + [
        Move(phase="backward", kind="all_reduce", nbytes=nbytes)
    ] * split.has_gradient(0)


COMMUNICATIONS: Mapping[str, Communication] = {
    "dispatch": Communication(
        moves=rows_travel,
        beside=lambda call: call.operator.kind == EXPERTS,
        own=lambda call: call.operator.kind == FILL_IN,
    ),
    # Neighbours are those of one axis, so a halo does not join axes.
    "halo": Communication(moves=_halo, limit=_halo_limit, joins=False),
    "normalize": Communication(moves=_normalize),
    ONCE: Communication(moves=rows_travel_once, in_turn=True, beside=lambda call: True),
    "prefix": Communication(moves=_prefix),
    "ring": Communication(moves=_ring, visits=True),
    "statistics": Communication(moves=_statistics, stacks=True),
    "vocabulary": Communication(moves=_vocabulary),
}


def visited(strategies: Strategies, mesh: Sequence[int]) -> Floats:
    """Runs of each strategy's local work, one for each shard that passes by: array [strategies]."""
    passing = np.array(
        [
            o.communication is not None and COMMUNICATIONS[o.communication].visits
            for o in strategies.options
        ]
    )
    return np.asarray(
        np.where(passing[strategies.choices], np.array(mesh, dtype=np.float64), 1.0).prod(axis=1)
    )


def operator_traffic(
    call: Call, strategies: Strategies, mesh: Sequence[int], gradients: frozenset[str]
) -> Iterator[tuple[NDArray[np.int64], Axes, Sequence[Move]]]:
    """Traffic inside an operator: indices of strategies, axes of the group, moves.

    Entries come in the order of the forward pass: those of scales, then the communicating options,
    by factor, then by axes.
    """
    yield from largest_traffic(call, strategies, mesh, gradients)
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    local = sizes / strategies.degrees(mesh)
    for index, option in sorted(enumerate(strategies.options), key=lambda pair: pair[1].factor):
        if option.communication is None:
            continue
        word = COMMUNICATIONS[option.communication]
        taken = (strategies.choices == index) & (np.array(mesh) > 1)
        for axes in axis_sets(mesh):
            group = taken[:, axes].all(axis=1)
            # Exchanges of several axes are priced axis by axis, or are those of all the axes on
            # which the option is taken, and of no part of them.
            whole = group if word.by_axis else group & (taken.sum(axis=1) == len(axes))
            rows = np.nonzero(whole)[0]
            if len(rows) and not (word.by_axis and len(axes) > 1):
                size = degree_of(axes, mesh)
                before = np.where(taken, np.array(mesh, dtype=np.float64), 1.0)[:, : axes[0]]
                split = Split(
                    call=call,
                    rule=strategies.rule,
                    factor=option.factor,
                    size=size,
                    outside=before.prod(axis=1)[rows],
                    outermost=taken[rows].argmax(axis=1),
                    local=local[rows],
                    gradients=gradients,
                )
                yield rows, axes, word.moves(split)
