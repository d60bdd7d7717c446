"""The model as the outer search sees it: its folded form, its micro-batches, the operators that recompute repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel import Cluster
from autopar.costmodel.step.pricing import MeshPrices
from autopar.search import Solution
from autopar.search.stages import least_bottleneck

from ..errors import UsageError, unknown
from ..ir import Graph, Role
from ..sharding.analysis import Analysis, analyse
from ..sharding.mesh import Mesh
from ..sharding.micro_batches import micro_batch_options, split_batch
from ..sharding.rules import RULES, preamble
from ..sharding.rules.experts import EXPERTS
from .candidates import STRIDE, micro_batch_counts
from .folding import Folding, Run, crossing_bytes, find_runs, fold
from .multiplicities import Counts, Segments
from .operator_costs import OperatorCosts
from .tables import Tables
from .tuning import TUNING

Ints = NDArray[np.int64]
T = TypeVar("T")
RECOMPUTES = ("none", "selective", "full")
"""Nothing; all but products with a weight (so norms, activation functions, attention's core); whole layers."""


class FoldedModel:
    """A graph to plan, whole and with its equal layers folded (`short`); analyses are made at first use."""

    def __init__(self, graph: Graph, *, train: bool, folded: bool = True) -> None:
        self.graph, self.train = graph, train
        self.runs: tuple[Run, ...] = find_runs(graph)
        self.folding: Folding = fold(graph, self.runs if folded else ())
        self.counts: Counts = self.folding.counts
        self._analyses: dict[tuple[bool, int], Analysis] = {}
        self._segments: dict[tuple[bool, str], Segments] = {}
        self._refused: dict[int, str] = {}
        self._prices: dict[tuple[Cluster, Mesh, int], MeshPrices] = {}
        self._kept: tuple[object, object] = (None, None)

    @cached_property
    def parameters(self) -> float:
        """Bytes of all parameters."""
        return sum(tensor.bytes for tensor in self.graph.parameters)

    @property
    def is_small(self) -> bool:
        """Whether a program of the whole model is made in a fraction of a second."""
        return len(self.graph.operators) <= TUNING.small_graph

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """The value of `make`, kept for the last key only: successive searches often differ in memory alone."""
        if self._kept[0] != key:
            self._kept = (key, make())
        return cast(T, self._kept[1])

    def prices(self, cluster: Cluster, mesh: Mesh, stages: int) -> MeshPrices:
        """The prices of communication on the mesh of one of so many stages."""
        key = (cluster, mesh, stages)
        if key not in self._prices:
            self._prices[key] = MeshPrices.of(cluster, mesh, self.parameters / stages)
        return self._prices[key]

    def analysis(self, *, short: bool, micro_batches: int = 1) -> Analysis:
        """The analysis of one of so many micro-batches; `UsageError` if the model does not divide into them."""
        key = (short, micro_batches)
        if key not in self._analyses:
            if micro_batches == 1:
                self._analyses[key] = analyse(self.folding.graph if short else self.graph, train=self.train)
            else:
                self._analyses[key] = split_batch(self.analysis(short=short), micro_batches)
        return self._analyses[key]

    def micro_batches(self, stages: int, pinned: int | None = None, *, every: bool = False) -> list[int]:
        """The numbers of micro-batches to try with so many stages: the `pinned` one, some, or `every` possible one."""
        counts = [pinned] if pinned is not None else micro_batch_counts(self.batch, stages, stride=1.0 if every else STRIDE)
        return [count for count in counts if count == 1 or self.divides(count)]

    def divides(self, micro_batches: int) -> bool:
        """Whether the global batch divides into so many micro-batches."""
        if micro_batches not in self._refused:
            try:
                self.analysis(short=True, micro_batches=micro_batches)
                self._refused[micro_batches] = ""
            except UsageError as error:
                self._refused[micro_batches] = str(error)
        return not self._refused[micro_batches]

    def why_not(self, micro_batches: int) -> str:
        """The reason why the model does not divide into so many micro-batches (empty: it does)."""
        self.divides(micro_batches)
        return self._refused[micro_batches]

    @property
    def batch(self) -> int:
        """The size of the global batch; 1 if the model cannot run on parts of it."""
        if not self.train:
            return 1
        try:
            return micro_batch_options(self.analysis(short=True)).size
        except UsageError:
            return 1

    @cached_property
    def cuts(self) -> Ints:
        """The operators before which a cut hands on fewest bytes, compared with the cuts just before and after."""
        handed = crossing_bytes(self.graph)
        inner = np.arange(1, len(self.graph.operators))
        low = (handed[inner] <= handed[inner - 1]) & (handed[inner] <= handed[inner + 1])
        return np.concatenate(([0], inner[low]))

    def imbalance(self, tables: Tables, solution: Solution, stages: int) -> float:
        """The least ratio of the slowest stage to the mean of so many stages, by the operators' own seconds."""
        if stages == 1:
            return 1.0
        counts = self.counts.operators
        own = {
            variable.name: float(unary[choice]) / counts[variable.name]
            for variable, unary, choice in zip(tables.variables, tables.graph.unary, solution.choices, strict=True)
            if variable.what == "operator"
        }
        seconds = np.array([own.get(self.folding.operators[op.name], 0.0) for op in self.graph.operators])
        # Stages end at good cuts, so their seconds are sums of whole pieces.
        pieces = np.add.reduceat(seconds, self.cuts)
        return max(least_bottleneck(pieces, stages) * stages / float(seconds.sum()), 1.0)

    def expand(self, figures: OperatorCosts) -> OperatorCosts:
        """The figures of the whole model, from those of the folded one."""
        place = {op.name: number for number, op in enumerate(self.folding.graph.operators)}
        source = np.array([place[self.folding.operators[op.name]] for op in self.graph.operators])
        found = {f.name: getattr(figures, f.name)[source] for f in fields(figures) if f.name != "handed"}
        return OperatorCosts(**found, handed=figures.handed[np.append(source, len(place))])

    def segments(self, recompute: str, *, short: bool) -> Segments:
        """The groups of operators that a recompute mode repeats."""
        if recompute not in RECOMPUTES:
            raise UsageError(unknown("recompute", recompute, RECOMPUTES))
        key = (short, recompute)
        if key not in self._segments:
            kept = {op.name for op in self.folding.graph.operators} if short else None
            found = tuple(self._groups(recompute)) if recompute != "none" else ()
            self._segments[key] = tuple(g for g in found if kept is None or set(g) <= kept)
        return self._segments[key]

    def _groups(self, recompute: str) -> Iterator[tuple[str, ...]]:
        """The layers, or ("selective") their stretches without a product with a weight."""
        cold = preamble(self.graph)
        for run in self.runs:
            for layer in run.segments():
                names: list[str] = []
                for index in layer:
                    operator = self.graph.operators[index]
                    if operator.name in cold:
                        continue
                    if recompute == "selective" and self._has_weight_product(index):
                        if names:
                            yield tuple(names)
                        names = []
                    else:
                        names.append(operator.name)
                if names:
                    yield tuple(names)

    def _has_weight_product(self, index: int) -> bool:
        operator = self.graph.operators[index]
        return operator.kind == EXPERTS or (
            bool(RULES[operator.kind].products)
            and any(self.graph.tensors[name].role is Role.PARAMETER and len(self.graph.tensors[name].shape) > 1 for name in operator.inputs)
        )
