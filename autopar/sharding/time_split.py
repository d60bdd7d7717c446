"""The batch factor of every operator: micro-batches split the batch over time as over an axis.

Every operator takes one option on the axis of time, on which nothing may be communicated. Options
are found from the inputs onwards:

    tensor                     on the axis of time
    inputs of the model        S(0), cut before the micro-batch
    parameters                 R, and B when read: their gradients are added up
    constants                  whole, and sliced where an operator reads them split
    preamble                   S where it is made of samples; the rest is made once, and sliced as
                               constants are
    results                    S, B where they hold no sample, P where the samples are summed or
                               averaged (losses)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import UsageError

from .analysis import Analysis
from .layout import Placement, S
from .rules import without_parameters
from .strategies import Option
from .time_walk import Conflict, Split, TimeWalk

REMEMBERED = 16
TRIES = 8
"""The most tensors to try split, of those that came whole to an operator that needs them split."""
BATCH_DIMS = 2
"""The number of leading dims of the inputs in which the batch is searched: the first one, else the
second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """The split of a model's batch of `size` samples into micro-batches."""

    size: int
    options: Mapping[str, Option]
    placements: Mapping[str, Placement]


# An entry holds its analysis, so that no later object has the same id. Errors are kept as well,
# since a search asks for many numbers of micro-batches.
_splits: OrderedDict[int, tuple[Analysis, TimeSplit | UsageError]] = OrderedDict()


def micro_batch_options(analysis: Analysis) -> TimeSplit:
    """The one way to run a model on micro-batches, remembered for the analyses asked for last.

    Raises `UsageError` that names the first operator which cannot.
    """
    entry = _splits.get(id(analysis))
    if entry is None or entry[0] is not analysis:
        try:
            entry = analysis, _find(analysis)
        except UsageError as error:
            entry = analysis, error
        _splits[id(analysis)] = entry
        if len(_splits) > REMEMBERED:
            _splits.popitem(last=False)
    if isinstance(entry[1], UsageError):
        raise entry[1]
    return entry[1]


def _find(analysis: Analysis) -> TimeSplit:
    inputs = [analysis.graph.tensors[name].shape for name in analysis.graph.inputs]
    sizes = [
        next((shape[dim] for shape in inputs if len(shape) > dim), 1) for dim in range(BATCH_DIMS)
    ]
    if sizes[0] <= 1:
        raise UsageError("the model's inputs hold one sample: there are no micro-batches of it")
    # A tensor with as many rows as the batch is tried split at once, or as the walk asks for it.
    free = without_parameters(analysis.graph)
    made = [
        analysis.graph.tensors[name]
        for op in free
        if op.name not in analysis.cold
        for name in op.outputs
    ]
    first: UsageError | None = None
    for dim, size in enumerate(sizes):
        rows = {t.name: S(dim) for t in made if t.shape[dim : dim + 1] == (size,)}
        # Tables of positions that differ by axis (time, height, width) have the batch behind these.
        behind = {
            t.name: S(t.shape.index(size, dim + 1)) for t in made if size in t.shape[dim + 1 :]
        }
        ways: tuple[Split, ...] = (rows, rows | behind, {})
        for preferred in (way for n, way in enumerate(ways) if way not in ways[:n]):
            try:
                return _find_on(analysis, dim, size, preferred)
            except UsageError as error:
                # The first way is the likeliest one, so its error is the one shown.
                first = first or error
    assert first is not None
    raise first


def _find_on(analysis: Analysis, dim: int, size: int, preferred: Split) -> TimeSplit:
    """Walk the model; at a conflict, split the tensor that lets the walk get further, of those that
    came whole.
    """
    split = preferred
    outcome = _walked(analysis, dim, size, split)
    while isinstance(outcome, Conflict):
        tried = ({**split, name: S(dim)} for name in outcome.whole[:TRIES])
        further = ((more, _walked(analysis, dim, size, more)) for more in tried)
        # Each round gets past the operator where the last one stopped, so there is an end.
        step = next(
            ((m, f) for m, f in further if not isinstance(f, Conflict) or f.place > outcome.place),
            None,
        )
        if step is None:
            operator = analysis.graph.operators[outcome.place]
            raise UsageError(
                f"the model cannot run on micro-batches: {operator.name!r} ({operator.kind}) needs "
                "the whole batch"
            )
        split, outcome = step
    return outcome


def _walked(analysis: Analysis, dim: int, size: int, split: Split) -> TimeSplit | Conflict:
    walk = TimeWalk(analysis, dim, size, split)
    try:
        walk.run()
    except Conflict as conflict:
        return conflict
    return TimeSplit(size=size, options=walk.options, placements=walk.placements())
