"""The batch factor of every operator: micro-batches split the batch over time as over an axis.

Where x_i is a tensor x on micro-batch i of m, and g_i the loss's gradient by it, a placement says

    S    x is all x_i side by side, and so is g      R    x_i = x, g_i = g
    B    x_i = x, the sum of all g_i is g            P    the sum of all x_i is x, g_i = g

Theorem: if the loss is P and parameters are B, the loss is the sum of all L_i, and a parameter's
gradient that of all g_i. Every operator takes one option on the axis of time, on which nothing may
be communicated; an option keeps the four lines, as its rule is proven to, and so does what leads
from one to another: a whole source is cut where it is read, and x / m is a share (B or R to P). A
backward pass begins with g_i = 1, which is g for a loss that is P. One that is B or R would count m
times, so it is declined.

What holds for a sum holds for a mean (a share is the micro-batch's own mean / m) and for what is
affine in sums and means, with constants divided by m. All else that joins samples has no option.

Besides, nothing is computed m times: an operator with a gradient that reads samples is S or P. One
that reads none (a cast of a parameter, a penalty on weights) may be B.

    tensor                     on the axis of time
    inputs of the model        S on the batch's dim, cut before the micro-batch
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
from .layout import Kind, Placement, S
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
    # The batch is a leading dim of some input, of the first one that has more than one row rather.
    batches = dict.fromkeys(
        (dim, shape[dim])
        for dim in range(BATCH_DIMS)
        for shape in inputs
        if len(shape) > dim and shape[dim] > 1
    )
    if all(dim for dim, _ in batches):
        raise UsageError("the model's inputs hold one sample: there are no micro-batches of it")
    furthest: Conflict | None = None
    best: tuple[int, TimeSplit] | None = None
    for dim, size in batches:
        held = sum(shape[dim : dim + 1] == (size,) for shape in inputs)
        for preferred in _preferred(analysis, dim, size):
            outcome = _find_on(analysis, dim, size, preferred)
            if isinstance(outcome, TimeSplit):
                places = [outcome.placements[name] for name in analysis.graph.inputs]
                cut = sum(place.kind is Kind.SPLIT for place in places)
                # Inputs that are only read whole may hold the batch elsewhere (steps come first).
                if cut >= held:
                    return outcome
                if best is None or cut > best[0]:
                    best = cut, outcome
            # The walk that got furthest is the likeliest one, so its conflict is the one told.
            elif furthest is None or outcome.place > furthest.place:
                furthest = outcome
    if best is not None:
        return best[1]
    assert furthest is not None
    raise _refusal(analysis, furthest)


def _preferred(analysis: Analysis, dim: int, size: int) -> list[Split]:
    """Ways to split what no input leads to: a tensor with as many rows as the batch is tried split
    at once, or as the walk asks for it.
    """
    made = [
        analysis.graph.tensors[name]
        for op in without_parameters(analysis.graph)
        if op.name not in analysis.cold
        for name in op.outputs
    ]
    rows = {t.name: S(dim) for t in made if t.shape[dim : dim + 1] == (size,)}
    # Tables of positions that differ by axis (time, height, width) have the batch behind these.
    behind = {t.name: S(t.shape.index(size, dim + 1)) for t in made if size in t.shape[dim + 1 :]}
    ways: tuple[Split, ...] = (rows, rows | behind, {})
    return [way for n, way in enumerate(ways) if way not in ways[:n]]


def _find_on(analysis: Analysis, dim: int, size: int, preferred: Split) -> TimeSplit | Conflict:
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
            return outcome
        split, outcome = step
    return outcome


def _refusal(analysis: Analysis, conflict: Conflict) -> UsageError:
    operator = analysis.graph.operators[conflict.place]
    return UsageError(
        "the model cannot run on micro-batches, only with micro_batches=1: "
        f"{operator.name!r} ({operator.kind}) depends on the whole batch{conflict.why}"
    )


def _walked(analysis: Analysis, dim: int, size: int, split: Split) -> TimeSplit | Conflict:
    walk = TimeWalk(analysis, dim, size, split)
    try:
        walk.run()
    except Conflict as conflict:
        return conflict
    return TimeSplit(size=size, options=walk.options, placements=walk.placements())
