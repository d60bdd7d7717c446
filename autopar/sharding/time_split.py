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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import RuleError, UsageError
from autopar.ir import Graph, Operator, Role, Tensor

from .analysis import Analysis, Offer
from .candidates import options_of
from .layout import B, Kind, Placement, R, S
from .notation import Dims, Rule
from .rules import RULES, Call, rule_of, without_parameters
from .strategies import Option

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


class _Conflict(Exception):
    """No option of an operator takes its inputs as they come.

    `whole`: tensors behind it that came whole and might have come split, the nearest first.
    """

    def __init__(self, place: int, whole: list[str]) -> None:
        self.place = place
        self.whole = whole


def _find(analysis: Analysis) -> TimeSplit:
    inputs = [analysis.graph.tensors[name].shape for name in analysis.graph.inputs]
    sizes = [
        next((shape[dim] for shape in inputs if len(shape) > dim), 1) for dim in range(BATCH_DIMS)
    ]
    if sizes[0] <= 1:
        raise UsageError("the model's inputs hold one sample: there are no micro-batches of it")
    # A tensor with as many rows as the batch is tried split at once, or as the walk asks for it.
    free = without_parameters(analysis.graph)
    made = [name for op in free if op.name not in analysis.cold for name in op.outputs]
    first: UsageError | None = None
    for dim, size in enumerate(sizes):
        rows = frozenset(
            name for name in made if analysis.graph.tensors[name].shape[dim : dim + 1] == (size,)
        )
        for preferred in (rows, frozenset[str]()) if rows else (rows,):
            try:
                return _find_on(analysis, dim, size, preferred)
            except UsageError as error:
                # The first way is the likeliest one, so its error is the one shown.
                first = first or error
    assert first is not None
    raise first


def _find_on(analysis: Analysis, dim: int, size: int, preferred: frozenset[str]) -> TimeSplit:
    """Walk the model; at a conflict, split the tensor that lets the walk get further, of those that
    came whole.
    """
    split = preferred
    outcome = _walked(analysis, dim, size, split)
    while isinstance(outcome, _Conflict):
        tried = (split | {name} for name in outcome.whole[:TRIES])
        further = ((more, _walked(analysis, dim, size, more)) for more in tried)
        # Each round gets past the operator where the last one stopped, so there is an end.
        step = next(
            ((m, f) for m, f in further if not isinstance(f, _Conflict) or f.place > outcome.place),
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


def _walked(
    analysis: Analysis, dim: int, size: int, split: frozenset[str]
) -> TimeSplit | _Conflict:
    try:
        return _Walk(analysis, dim, size, split).run()
    except _Conflict as conflict:
        return conflict


class _Walk:
    """The placements on the axis of time, in the model's order.

    `split`: tensors that hold the batch though no input leads to them: constants, results of the
    preamble, rows that are repeated for every sample.
    """

    def __init__(self, analysis: Analysis, dim: int, size: int, split: frozenset[str]) -> None:
        self.analysis = analysis
        self.dim = dim
        self.size = size
        self.split = split
        self.graph: Graph = analysis.graph
        self.made: dict[str, Placement] = {}  # of results of warm operators
        self.natural: dict[str, Placement] = {}  # of sources that hold the batch
        self.read: dict[str, Placement] = {}  # of sources, as warm operators read them
        self.options: dict[str, Option] = {}
        self.known: dict[object, Option | None] = {}
        self.producers = self.graph.producers()
        for name in (
            *self.graph.inputs,
            *(n for n in split if self.graph.tensors[n].role is Role.CONSTANT),
        ):
            if name in split or self._holds_batch(self.graph.tensors[name]):
                self.natural[name] = S(dim)

    def _holds_batch(self, tensor: Tensor) -> bool:
        return len(tensor.shape) > self.dim and tensor.shape[self.dim] == self.size

    def _may_be_split(self, tensor: Tensor) -> bool:
        return (
            len(tensor.shape) > self.dim
            and tensor.shape[self.dim] > 0
            and tensor.shape[self.dim] % self.size == 0
        )

    def run(self) -> TimeSplit:
        for place, operator in enumerate(self.graph.operators):
            if operator.name in self.analysis.cold:
                self._cold(operator)
            elif not self._warm(operator):
                raise _Conflict(place, self._whole_behind(operator))
        for updated in self.graph.updates.values():
            # A running statistic has one new value, not a part of one from each micro-batch.
            if self.made.get(updated, R).kind in (Kind.SPLIT, Kind.PARTIAL):
                raise _Conflict(self.producers[updated][0], [])
        cold = (
            op
            for op in self.graph.operators
            if op.name in self.analysis.cold and op.name in self.options
        )
        cut = {
            name: self.natural[name]
            for op in cold
            for name in (*op.inputs, *op.outputs)
            if name in self.natural
        }
        placements = {
            name: self.made.get(name, self.read.get(name, cut.get(name, R)))
            for name in self.graph.tensors
        }
        return TimeSplit(size=self.size, options=self.options, placements=placements)

    def _cold(self, operator: Operator) -> None:
        """Run a preamble operator for each micro-batch if it maps samples to samples, else once for
        the whole batch.
        """
        wanted = operator.outputs[0] in self.split
        self.natural.update((name, S(self.dim)) for name in operator.outputs if name in self.split)
        # Operators of the preamble need no rule: without one they run once.
        if operator.kind not in RULES or not (
            wanted or any(name in self.natural for name in operator.inputs)
        ):
            return
        key = (
            self.graph.operator_fingerprint(operator),
            tuple(self.natural.get(name) for name in operator.inputs),
            wanted,
        )
        if key not in self.known:
            self.known[key] = self._handed_on(operator, wanted)
        option = self.known[key]
        if option is not None:
            self.options[operator.name] = option
            self.natural.update(
                (n, p)
                for n, p in zip(operator.outputs, option.outputs, strict=True)
                if p.kind is Kind.SPLIT
            )

    def _handed_on(self, operator: Operator, wanted: bool) -> Option | None:
        """The option of a preamble's operator that takes samples as they come and gives samples."""
        names = operator.inputs
        for option in self._all_options(operator):
            agrees = all(
                p == self.natural.get(n, p) for n, p in zip(names, option.inputs, strict=True)
            )
            if (
                agrees
                and all(p.kind is Kind.SPLIT for p in option.outputs)
                and (not wanted or option.outputs[0] == S(self.dim))
            ):
                return option
        return None

    def _all_options(self, operator: Operator) -> list[Option]:
        """All options without communication that fit the inputs; includes part counts that a search
        leaves out.
        """
        call = Call.of(self.graph, operator)
        try:
            rule = rule_of(call)
        except RuleError:
            return []
        variants: dict[int, tuple[int, ...]] = {}
        for name, dims in zip(operator.inputs, rule.inputs, strict=True):
            come = self.made.get(name, self.natural.get(name, R))
            if (
                come.kind is Kind.SPLIT
                and (carried := factor_of((come.dim, come.parts), dims, rule)) is not None
            ):
                factor, parts = carried
                variants[factor] = (parts,)
        return [
            o
            for o in options_of(call, rule, self.analysis.gradients, variants)
            if o.communication is None
        ]

    def _warm(self, operator: Operator) -> bool:
        """Give an operator its option; whether there is one."""
        offer = self.analysis.offers[operator.name]
        key = (
            id(offer),
            tuple(map(self._comes, operator.inputs)),
            operator.outputs[0] in self.split,
        )
        if key not in self.known:
            self.known[key] = self._option(operator, offer)
        option = self.known[key]
        if option is None:
            return False
        self.options[operator.name] = option
        self.made.update(zip(operator.outputs, option.outputs, strict=True))
        sliced = (
            (n, p)
            for n, p in zip(operator.inputs, option.inputs, strict=True)
            if n not in self.made and p.kind is Kind.SPLIT
        )
        # A source is sliced in one way for all its readers.
        return all(self.read.setdefault(name, placement) == placement for name, placement in sliced)

    def _comes(self, name: str) -> tuple[Placement | None, bool]:
        """An input's placement, and whether it is a source, which is sliced when it is read."""
        if name in self.made:
            return self.made[name], False
        if self.graph.tensors[name].role is Role.PARAMETER:
            return (B if name in self.analysis.gradients else R), False
        return self.natural.get(name), True

    def _option(self, operator: Operator, offer: Offer) -> Option | None:
        """The option that takes the inputs as they come; an input that nothing splits is whole."""
        # Options that the search does without (other parts, dims that it keeps whole) may still be
        # right over time.
        option = self._best(operator, (o for o in offer.options if o.communication is None))
        return option or self._best(operator, self._all_options(operator))

    def _best(self, operator: Operator, options: Iterable[Option]) -> Option | None:
        comes = [self._comes(name) for name in operator.inputs]
        best: tuple[tuple[int, bool, bool], Option] | None = None
        for option in options:
            if all(_fits(wanted, *come) for wanted, come in zip(option.inputs, comes, strict=True)):
                matched = sum(
                    wanted == have
                    for wanted, (have, source) in zip(option.inputs, comes, strict=True)
                    if source
                )
                # First as many sources as possible as they are, then the output split where that is
                # asked for and only there, then no factor at all.
                rank = (
                    -matched,
                    (option.outputs[0] == S(self.dim)) != (operator.outputs[0] in self.split),
                    option.factor >= 0,
                )
                if best is None or rank < best[0]:
                    best = rank, option
        return best[1] if best is not None else None

    def _whole_behind(self, operator: Operator) -> list[str]:
        """Tensors behind an operator's inputs that came whole and have as many rows as the batch,
        the nearest first.
        """
        seen: dict[str, bool] = {}
        # The list grows while it is walked, which gives the nearest first.
        behind = list(operator.inputs)
        for name in behind:
            if name in seen or self.made.get(name, B) not in (B, R):
                continue
            seen[name] = False
            tensor = self.graph.tensors[name]
            if not self._may_be_split(tensor) and name not in self.made:
                continue
            if name in self.made:
                maker = self.graph.operators[self.producers[name][0]]
                behind += maker.inputs
                offered = (
                    self.analysis.offers[maker.name].options if name == maker.outputs[0] else ()
                )
                makes = any(
                    o.outputs[0] == S(self.dim) and all(p.kind is not Kind.SPLIT for p in o.inputs)
                    for o in offered
                )
                seen[name] = makes and self._may_be_split(tensor)
            elif name not in self.natural:
                seen[name] = tensor.role in (Role.CONSTANT, Role.ACTIVATION)
        return [name for name, splits in seen.items() if splits]


def factor_of(split: tuple[int, int], dims: Dims, rule: Rule) -> tuple[int, int] | None:
    """The (factor, parts) of a tensor's split (dim, parts).

    It is the innermost term whose outer terms divide the parts.
    """
    dim, parts = split
    outside = 1
    for factor in dims[dim]:
        size = rule.factors[factor].size
        if parts % outside == 0 and parts // outside < size and size % (parts // outside) == 0:
            return factor, parts // outside
        outside *= size
    return None


def _fits(wanted: Placement, have: Placement | None, source: bool) -> bool:
    """Whether an input may be read as `wanted` without communication between micro-batches."""
    # Such a source is whole on every device, so reading a part of it is a slice.
    if source and have is None:
        return wanted == R or wanted.kind is Kind.SPLIT
    return wanted == have
