"""From an analysed model and a mesh to the priced tables of a cost graph.

Variables: a strategy for every operator that the search decides on, a storage layout for every parameter, the one layout
to which a tensor with several readers is brought (a fan-out), and the layout of every output. Edges: redistributions.
Tables are built once for each distinct signature and shared, so that equal layers are recognised by the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.device.operators import operator_seconds
from autopar.costmodel.memory.kept import Share, kept_values
from autopar.costmodel.step.casts import cast_seconds
from autopar.costmodel.step.distances import Distances, LayoutSpace, layout_space
from autopar.costmodel.step.pricing import MeshPrices, communication_seconds, storage_bytes, update_seconds
from autopar.search import CostGraph

from .ir import Graph, Operator, Role, Tensor
from .planning.work import Work
from .sharding.analysis import Analysis, Offer
from .sharding.candidates import Strategies, is_storable, strategies_of
from .sharding.layout import Kind, Layout, Placement, R
from .sharding.notation import local_elements
from .sharding.rules import RULES
from .sharding.schedule import PLAIN, Types

T = TypeVar("T")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
THRIFTY_AXES = 3
"""Meshes of as many axes leave out matrix products that some axis repeats: the meshes of fewer axes hold those plans."""
BATCH_TIE = 1e-12
"""Seconds by which an earlier factor (the batch comes first) is preferred among strategies of equal price."""

Choices = tuple[Ints, Floats, Floats, Ints]
"""Rows, seconds, bytes and digits of a variable's choices."""

Allow = Callable[[str, Offer, Strategies], NDArray[np.bool_]]
"""Which strategies of the operator of that name may be chosen."""
AllowLayouts = Callable[[Tensor, tuple[Layout, ...]], NDArray[np.bool_]]
"""Which storage layouts of a parameter may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What pins, a scheme or a loaded plan leave to choose from; everything by default."""

    strategies: Allow | None = None
    storage: AllowLayouts | None = None
    outputs: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Known:
    """Parts of tables by what they depend on; `keep` holds the arrays whose identity stands in a key."""

    parts: dict[object, Any] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable of the cost graph: `what` is operator, parameter, fan-out or output; `name` of the operator or tensor.

    `rows`: for an operator the strategy indices; for the others the codes of the layouts to choose from. `host`: of a parameter, the
    bytes of the optimizer's state that each choice leaves in host memory (None: no choice does).
    """

    what: str
    name: str
    rows: Ints
    host: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A cost graph with what its variables stand for, and for how many tensors one stands (where for more than itself).

    `host_room`: bytes that a solution may leave in host memory. `chains`: redistributions that were found for solutions of such tables.
    """

    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    graph: CostGraph
    variables: tuple[Variable, ...]
    strategies: Mapping[str, Strategies]
    spaces: Mapping[str, LayoutSpace]
    counts: Mapping[str, int]
    host_room: float = math.inf
    types: Types = PLAIN.types
    chains: dict[object, tuple[Layout, ...]] = field(default_factory=dict)

    def least_kept(self) -> float:
        """Bytes that operators keep whatever is chosen."""
        memory = zip(self.variables, self.graph.memory or (), strict=False)
        return math.fsum(float(kept.min()) for variable, kept in memory if variable.what == "operator")

    def host_of(self, choices: Sequence[int]) -> float:
        """Bytes that an assignment leaves in host memory."""
        return math.fsum(float(v.host[choice]) for v, choice in zip(self.variables, choices, strict=True) if v.host is not None)


def build_tables(
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    limits: Limits | None = None,
    work: Work | None = None,
    known: Known | None = None,
    types: Types = PLAIN.types,
) -> Tables:
    """Price every strategy, storage layout and redistribution of a model (of one micro-batch of it) on one mesh.

    `known`: parts of tables built before for the same analysis, prices, optimizer and types, to which those of these are added.
    """
    known = known if known is not None else Known()
    return _Builder(analysis, prices, optimizer, limits or Limits(), work or Work(), known, types).build()


def kept_bytes(strategies: Strategies, mesh: Sequence[int], shares: Iterable[Share]) -> Floats:
    """Bytes of the shares of what an operator keeps, on one device: array [strategies]."""
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    local = sizes / strategies.degrees(tuple(mesh))
    total = np.zeros(len(local))
    for share in shares:
        dims = strategies.rule.outputs if share.output else strategies.rule.inputs
        elements = local_elements(dims[share.position], local)
        if share.factors:
            elements = elements / strategies.plain_degree(tuple(mesh), share.factors)
        total += elements * share.nbytes
    return total


class _Builder:
    def __init__(
        self, analysis: Analysis, prices: MeshPrices, optimizer: str, limits: Limits, work: Work, known: Known, types: Types
    ) -> None:
        self.analysis, self.prices, self.optimizer, self.limits, self.work = analysis, prices, optimizer, limits, work
        self.types = types
        self.graph: Graph = analysis.graph
        self.mesh = prices.mesh.shape
        self.variables: list[Variable] = []
        self.unary: list[Floats] = []
        self.memory: list[Floats] = []
        self.digits: list[Ints] = []
        self.edges: dict[tuple[int, int], Floats] = {}
        self.strategies: dict[str, Strategies] = {}
        self.source_codes: dict[tuple[int, str], Ints] = {}
        self.spaces: dict[str, LayoutSpace] = {}
        self.cache, self.keep = known.parts, known.keep
        self.made: dict[str, tuple[int, Ints]] = {}
        self.handed: list[tuple[str, int, Ints, int]] = []
        self.kept = kept_values(analysis, work.segments)
        self.again = frozenset(name for segment in work.segments for name in segment)
        self.wider = max((self._wider(tensor) for tensor in self.graph.parameters), default=1.0)

    def build(self) -> Tables:
        at: dict[str, int] = {}
        for name in self.analysis.kinds:
            self.spaces[name] = self._space(self.analysis.kinds[name])
        for tensor in self.graph.parameters:
            if tensor.name in self.analysis.readers:
                self._parameter(tensor)
                self._spread(tensor.name, len(self.variables) - 1, self.variables[-1].rows, at)
        for index, op in enumerate(self.graph.operators):
            if op.name not in self.analysis.cold:
                self._operator(index, op, at)
        for name, target, codes, count in self.handed:
            self._hand_on(name, target, codes, count)
        graph = CostGraph(
            sizes=tuple(len(v.rows) for v in self.variables), unary=tuple(self.unary), edges=self.edges, memory=tuple(self.memory),
            digits=tuple(self.digits), names=tuple(f"{v.what} {v.name}" for v in self.variables),
        )  # fmt: skip
        return Tables(
            analysis=self.analysis, prices=self.prices, optimizer=self.optimizer, graph=graph, variables=tuple(self.variables),
            strategies=self.strategies, spaces=self.spaces, counts=self.work.counts.tensors, types=self.types,
            chains=self._once("chains", dict[object, tuple[Layout, ...]]),
        )  # fmt: skip

    def _space(self, kinds: tuple[Placement, ...]) -> LayoutSpace:
        return layout_space(kinds, self.mesh)

    def _storable(self, space: LayoutSpace, codes: Ints) -> Ints:
        """Those of the layouts that a DTensor can have."""
        return codes[[is_storable(space.layout(int(code)), self.mesh) for code in codes]]

    def _once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, made once for each key."""
        if key not in self.cache:
            self.cache[key] = make()
        return cast(T, self.cache[key])

    def _content(self, codes: Ints) -> int:
        """A number for the content of an array that stays alive; each array is looked at once."""
        return self._once(("content of", id(codes)), lambda: self._once(("content", codes.tobytes()), lambda: len(self.cache)))

    def _add(self, what: str, name: str, rows: Ints, unary: Floats, memory: Floats, digits: Ints) -> int:
        self.variables.append(Variable(what=what, name=name, rows=rows))
        self.unary.append(unary)
        self.memory.append(memory)
        self.digits.append(digits)
        return len(self.variables) - 1

    def _parameter(self, tensor: Tensor) -> None:
        space = self.spaces[tensor.name]
        splits = tuple(i for i, kind in enumerate(space.kinds) if kind == R or kind.kind is Kind.SPLIT)
        kept = tensor.name in self.kept.weights and self.work.zero < 3
        count = self.work.counts.tensors.get(tensor.name, 1)
        # Operators that keep it count the weight as they use it: the stored shard itself, or a gathered (or cast) copy beside it.
        counted = kept and not self.types.casts(tensor)
        key = ("parameter", id(space), tensor.shape, tensor.bytes, tensor.trainable, counted, count)

        def make() -> tuple[Ints, Floats, Floats, Ints]:
            digits = space.digits()
            rows = self._storable(space, np.nonzero(space.valid(tensor.shape) & np.isin(digits, splits).all(axis=1))[0])
            shards = space.divisors()[rows]
            seconds = self._stored_seconds(tensor, shards) if self.analysis.train else np.zeros(len(rows))
            memory = storage_bytes(tensor, shards, self.optimizer, train=self.analysis.train, types=self.types)
            return rows, count * seconds, count * (memory - tensor.bytes / shards if counted else memory), digits[rows]

        rows, unary, memory, digits = self._once(key, make)
        if self.limits.storage is not None:
            allowed = self.limits.storage(tensor, tuple(space.layout(int(code)) for code in rows))
            rows, unary, memory, digits = self._masked(key, allowed, rows, unary, memory, digits)
        self._add("parameter", tensor.name, rows, unary, memory, digits)

    def _stored_seconds(self, tensor: Tensor, shards: Ints) -> Floats:
        """Seconds of the update of a stored parameter, and of its cast."""
        update = update_seconds(tensor, shards, self.optimizer, self.prices.cluster, self.types)
        return update + cast_seconds(tensor, shards, self.prices.cluster, self.types)

    def _masked(self, key: object, allowed: NDArray[np.bool_], rows: Ints, unary: Floats, memory: Floats, digits: Ints) -> Choices:
        return self._once((key, allowed.tobytes()), lambda: (rows[allowed], unary[allowed], memory[allowed], digits[allowed]))

    def _operator(self, index: int, op: Operator, at: dict[str, int]) -> None:
        offer = self.analysis.offers[op.name]
        work, shares = self.work, (self.kept.shares.get(op.name, ()), self.kept.passing.get(op.name, ()))
        often = (work.counts.operators.get(op.name, 1), work.passes, work.in_flight, self._weight_often(), op.name in self.again)
        key = ("operator", id(offer), shares, often)

        def make() -> tuple[Strategies, Ints, Floats, Floats, Ints]:
            strategies = self._once(("strategies", id(offer)), lambda: self._strategies(offer))
            unary, memory = self._price(op, offer, strategies)
            return strategies, np.arange(len(unary)), unary, memory, strategies.choices

        strategies, rows, unary, memory, digits = self._once(key, make)
        if self.limits.strategies is not None:
            allowed = self.limits.strategies(op.name, offer, strategies)
            rows, unary, memory, digits = self._masked(key, allowed, rows, unary, memory, digits)
        self.strategies[op.name] = strategies
        variable = self._add("operator", op.name, rows, unary, memory, digits)
        for position, name in enumerate(op.inputs):
            if name in at:
                self._edge(name, at[name], variable, self._codes(op, strategies, rows, position, False))
        for position, name in enumerate(op.outputs):
            self._spread(name, variable, self._codes(op, strategies, rows, position, True), at)

    def _strategies(self, offer: Offer) -> Strategies:
        """All strategies; on a large mesh, unless something is pinned, a matrix product splits every axis if it can."""
        found = strategies_of(offer.rule, offer.options, self.mesh)
        if len(self.mesh) < THRIFTY_AXES or self.limits.strategies is not None or not RULES[offer.call.operator.kind].products:
            return found
        splits = np.array([option.factor >= 0 for option in offer.options])[found.choices].all(axis=1)
        return replace(found, choices=np.ascontiguousarray(found.choices[splits])) if splits.any() else found

    def _price(self, op: Operator, offer: Offer, strategies: Strategies) -> tuple[Floats, Floats]:
        count, again, work = self.work.counts.operators.get(op.name, 1), op.name in self.again, self.work
        seconds = self._once(("seconds", id(offer), again), lambda: self._seconds(op, offer, strategies, again=again))
        memory = np.zeros(len(seconds))
        for weight, often in ((True, self._weight_often()), (False, work.in_flight)):
            shares = [share for share in self.kept.shares.get(op.name, ()) if share.weight == weight]
            memory += often * kept_bytes(strategies, self.mesh, shares) if shares else 0.0
        return count * work.passes * seconds + BATCH_TIE * strategies.choices.sum(axis=1), count * memory

    def _wider(self, tensor: Tensor) -> float:
        """Bytes of a gradient for each byte of the value."""
        return self.types.reduced_bytes(tensor) / tensor.bytes if tensor.bytes else 1.0

    def _weight_often(self) -> float:
        """Bytes kept for each byte of a parameter as it is used: the copy, and its gradient where that is added up whole."""
        work = self.work
        return 0.0 if work.zero == 3 else 1.0 + self.wider if work.zero == 1 and work.accumulating else 1.0

    def _seconds(self, op: Operator, offer: Offer, strategies: Strategies, *, again: bool) -> Floats:
        """Seconds of one micro-batch, with its second forward pass where it is computed `again`."""
        gradients = self.analysis.as_offered(op, self.analysis.gradients)
        forward, backward = operator_seconds(offer.call, strategies, self.mesh, self.prices.cluster, gradients)
        inside = communication_seconds(offer.call, strategies, self.prices, gradients)
        repeated = forward + 0.5 * inside if again else 0.0
        return forward + backward + inside + repeated

    def _codes(self, op: Operator, strategies: Strategies, rows: Ints, position: int, output: bool) -> Ints:
        """Layout codes of one tensor of an operator, for the strategies in `rows`."""
        name = op.outputs[position] if output else op.inputs[position]
        space = self.spaces[name]

        def make() -> Ints:
            lut = np.array([space.kinds.index((o.outputs if output else o.inputs)[position]) for o in strategies.options])
            codes = space.codes(lut[strategies.choices[rows]])
            self.keep.append(codes)
            return codes

        self.keep.append(rows)
        return self._once(("codes", id(strategies), id(rows), position, output, id(space)), make)

    def _spread(self, name: str, source: int, codes: Ints, at: dict[str, int]) -> None:
        """Join a made tensor to a fan-out (when it has several readers) and to the output variable (when it leaves)."""
        readers = self.analysis.readers.get(name, ())
        space = self.spaces.get(name)
        if space is None or not readers:
            return
        at[name] = source
        self.source_codes[source, name] = codes
        self.made[name] = source, codes
        if len(readers) > 1:
            fan = self._fan_out(name, codes, readers)
            self._edge(name, source, fan, self.variables[fan].rows)
            at[name] = fan
            self.source_codes[fan, name] = self.variables[fan].rows
        for operator, _ in readers:
            if operator < 0:
                out = self._output(name)
                self._edge(name, at[name], out, self.variables[out].rows)

    def _fan_out(self, name: str, codes: Ints, readers: tuple[tuple[int, int], ...]) -> int:
        space = self.spaces[name]
        kinds: set[int] = set()
        for operator, position in readers:
            if operator >= 0:
                op = self.graph.operators[operator]
                kinds |= {space.kinds.index(o.inputs[position]) for o in self.analysis.offers[op.name].options}
        tensor = self.graph.tensors[name]
        key = ("fan-out", id(space), tensor.shape, self._content(codes), tuple(sorted(kinds)))

        def make() -> tuple[Ints, Floats, Ints]:
            digits = space.digits()
            wanted = space.valid(tensor.shape) & (np.bincount(sorted(kinds), minlength=len(space.kinds)) > 0)[digits].all(axis=1)
            wanted[np.unique(codes)] = True
            rows = np.nonzero(wanted)[0]
            return rows, np.zeros(len(rows)), digits[rows]

        rows, zero, digits = self._once(key, make)
        return self._add("fan-out", name, rows, zero, zero, digits)

    def _output(self, name: str) -> int:
        space, tensor = self.spaces[name], self.graph.tensors[name]
        pinned = R if name in (self.graph.loss, *self.graph.updates.values()) else None
        splits = tuple(i for i, kind in enumerate(space.kinds) if kind == R or (kind.kind is Kind.SPLIT and pinned is None))
        key = ("output", id(space), tensor.shape, splits, self.limits.outputs.get(name))

        def make() -> tuple[Ints, Floats, Ints]:
            digits = space.digits()
            rows = self._storable(space, np.nonzero(space.valid(tensor.shape) & np.isin(digits, splits).all(axis=1))[0])
            if name in self.limits.outputs:
                rows = np.array([space.code(self.limits.outputs[name])])
            return rows, np.zeros(len(rows)), digits[rows]

        rows, zero, digits = self._once(key, make)
        return self._add("output", name, rows, zero, zero, digits)

    def _edge(self, name: str, source: int, target: int, target_codes: Ints) -> None:
        variable = self.variables[target]
        counts = self.work.counts
        of = counts.operators if variable.what == "operator" else counts.tensors
        count = of.get(variable.name, 1)
        if name in counts.handed and self.made[name][0] == source and count > 1:
            self.handed.append((name, target, target_codes, count - 1))
            count = 1
        self._join(name, source, self.source_codes[source, name], target, target_codes, count)

    def _hand_on(self, name: str, target: int, target_codes: Ints, count: int) -> None:
        """What reads a value of the first layer reads that of the layer that stands for the others, so many times."""
        other = self.work.counts.handed[name]
        source, codes = self.made[other]
        mine, theirs = self.spaces[name], self.spaces[other]
        same = np.array([mine.kinds.index(kind) if kind in mine.kinds else -1 for kind in theirs.kinds])
        digits = same[theirs.digits()[codes]]
        assert (digits >= 0).all(), "equal operators give their outputs in equal ways"
        self._join(name, source, self._once(("handed", id(codes), id(mine)), lambda: mine.codes(digits)), target, target_codes, count)

    def _join(self, name: str, source: int, source_codes: Ints, target: int, target_codes: Ints, count: int) -> None:
        """The edge of a redistribution that is done `count` times."""
        tensor, space, variable = self.graph.tensors[name], self.spaces[name], self.variables[target]
        from_storage = self.variables[source].what == "parameter" and name in self.analysis.gradients
        again = variable.what == "operator" and variable.name in self.again
        often = self.work.of_parameters if tensor.role is Role.PARAMETER else self.work.of_values(again)
        trained, hidden = name in self.analysis.gradients, self.work.hidden
        matrix_key = ("distances", id(space), tensor.shape, tensor.bytes, self._wider(tensor), trained, from_storage, often, count, hidden)

        def table() -> Floats:
            prices = self._once(matrix_key, lambda: self._distances(tensor, space, often))
            if from_storage:
                summed = self.types.reduced_bytes(tensor)
                rows = prices.rows_from_storage(source_codes, self.prices.unit_lines, summed, 1 - self.work.hidden)
            else:
                rows = prices.rows(source_codes)
            return count * np.ascontiguousarray(rows[:, target_codes])

        self.keep += [source_codes, target_codes]
        value = self._once((matrix_key, id(source_codes), id(target_codes)), table)
        pair = (source, target)
        if source > target:
            pair, before = (target, source), value
            value = self._once(("transposed", id(before)), lambda: np.ascontiguousarray(before.T))
        if pair in self.edges:
            known, added = self.edges[pair], value
            self.keep.append(known)
            value = self._once(("sum", id(known), id(added)), lambda: known + added)
        self.edges[pair] = value

    def _distances(self, tensor: Tensor, space: LayoutSpace, often: tuple[float, float]) -> Distances:
        """Tensors of equal bytes for which the same layouts are valid share them."""
        gradient, wider, stored = tensor.name in self.analysis.gradients, self._wider(tensor), tensor.role is Role.PARAMETER
        lines = self.prices.unit_lines if stored else self.prices.lines

        def make() -> Distances:
            return Distances(space, tensor.shape, tensor.bytes, lines, gradient=gradient, often=often, wider=wider)

        return self._once(("reach", id(space), tensor.bytes, wider, gradient, stored, often, space.valid(tensor.shape).tobytes()), make)
