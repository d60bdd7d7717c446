"""The model as the outer search sees it: folded, in micro-batches, with operators recomputed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel import Cluster
from autopar.costmodel.memory.worthwhile_recompute import worthwhile
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.search import sharing_orders
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layer_numbers import between_layers
from autopar.sharding.mesh import Mesh
from autopar.sharding.micro_batches import micro_batch_options, split_batch
from autopar.sharding.regions import Region
from autopar.sharding.rules import is_product

from .counts import Counts, Segments
from .folding import Folding, Run, crossing_bytes, find_runs, fold
from .recompute import RECOMPUTES, stretches

Ints = NDArray[np.int64]
T = TypeVar("T")
SMALL_GRAPH = 500
"""The most operators of a graph whose whole program is made in a fraction of a second."""


class FoldedModel:
    """A graph to plan, both whole and with its equal layers folded (`short`).

    Analyses are made when they are first needed.
    """

    def __init__(self, graph: Graph, *, train: bool, folded: bool = True) -> None:
        self.graph = graph
        self.train = train
        self._folds = folded
        self.runs: tuple[Run, ...] = find_runs(graph)
        self.folding: Folding = fold(graph, self.runs if folded else ())
        self.counts: Counts = self.folding.counts
        self._analyses: dict[tuple[bool, int], Analysis] = {}
        self._segments: dict[tuple[bool, str, bool], Segments] = {}
        self._refused: dict[int, str] = {}
        self._prices: dict[tuple[Cluster, Mesh, int], MeshPrices] = {}
        self._remembered: tuple[object, object] = (None, None)
        self._shared: dict[object, object] = {}

    @cached_property
    def parameters(self) -> float:
        """Bytes of all parameters."""
        return sum(tensor.bytes for tensor in self.graph.parameters)

    @property
    def is_small(self) -> bool:
        """Whether a program of the whole model is made in a fraction of a second."""
        return len(self.graph.operators) <= SMALL_GRAPH

    def serves(self, graph: Graph, train: bool, *, folded: bool) -> bool:
        """Whether this is what such a graph is folded to."""
        return graph is self.graph and (train, folded) == (self.train, self._folds)

    def remembered(self, key: object, make: Callable[[], T]) -> T:
        """Return the value of `make`, remembered for the last key only.

        One key is enough, because successive searches of a model mostly differ in memory alone.
        """
        # A single entry: what is remembered is large.
        if self._remembered[0] != key:
            self._remembered = (key, make())
        return cast(T, self._remembered[1])

    def shared(self, key: object, make: Callable[[], T]) -> T:
        """Return the value of `make`, remembered for all searches of the model.

        Its orders of elimination are its own, so that it does not depend on who asks first.
        """
        if key not in self._shared:
            with sharing_orders():
                self._shared[key] = make()
        return cast(T, self._shared[key])

    def prices(self, cluster: Cluster, mesh: Mesh, stages: int) -> MeshPrices:
        """The prices of communication on the mesh of one of so many stages."""
        key = (cluster, mesh, stages)
        if key not in self._prices:
            self._prices[key] = MeshPrices.of(cluster, mesh, self.parameters / stages)
        return self._prices[key]

    def analysis(self, *, short: bool, micro_batches: int = 1) -> Analysis:
        """Return the analysis of one of so many micro-batches.

        Raises `UsageError` if the model does not divide into them, or has nothing to split.
        """
        key = (short, micro_batches)
        if key not in self._analyses:
            # A micro-batch is split off the analysis of the whole, so that both offer the same
            # options.
            if micro_batches == 1:
                whole = analyse(self.folding.graph if short else self.graph, train=self.train)
                if not whole.warm:
                    raise UsageError(
                        "no operator of the model depends on a parameter of floating point, so "
                        "that every device computes all of it: run it as it is, without a plan"
                    )
                regions = (part for one in whole.regions for part in self._within_layers(one))
                self._analyses[key] = replace(whole, regions=tuple(regions))
            else:
                self._analyses[key] = split_batch(self.analysis(short=short), micro_batches)
        return self._analyses[key]

    def _within_layers(self, region: Region) -> tuple[Region, ...]:
        """The region if it lies in one of the equal layers, else its members by themselves."""
        layers = {self._layer_of[name] for name in region.members}
        return (region,) if len(layers) == 1 else region.apart()

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        """By the name of an operator: the number of its layer, or of the stretch between layers."""
        starts = {part.start for run in self.runs for part in run.segments()}
        starts |= {run.stop for run in self.runs}
        numbers = itertools.accumulate(i in starts for i in range(len(self.graph.operators)))
        return dict(zip((op.name for op in self.graph.operators), numbers, strict=True))

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
        # Micro-batches fill pipelines and save less for the backward pass; inference has neither.
        if not self.train:
            return 1
        try:
            return micro_batch_options(self.analysis(short=True)).size
        except UsageError:
            return 1

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """For each place between two layers, the operators before which the second may begin."""
        operators = self.graph.operators
        return between_layers((op.name, is_product(op.kind)) for op in operators)

    @cached_property
    def cuts(self) -> Ints:
        """The operators before which fewer bytes are handed on than beside them."""
        handed = crossing_bytes(self.graph)
        inner = np.arange(1, len(self.graph.operators))
        # A local minimum of what is handed on, such as the residual stream between layers.
        low = (handed[inner] <= handed[inner - 1]) & (handed[inner] <= handed[inner + 1])
        return np.concatenate(([0], inner[low]))

    def segments(self, recompute: str, *, short: bool, all_named: bool = False) -> Segments:
        """The groups of operators that a mode of recompute, or modules, repeat (see `recompute`).

        Groups that save nothing are left out, but for those of modules that are named, and of what
        a project recomputes, with `all_named`.
        """
        key = (short, recompute, all_named)
        if key not in self._segments:
            all_of = tuple(stretches(self.graph, self.runs, recompute))
            names = {op.name for op in self.folding.graph.operators}
            # Of the folded graph only whole layers that are in it are repeated.
            folded = {one.names: one.key for one in all_of if names.issuperset(one.names)}
            chosen = tuple(folded)
            if folded and (recompute in RECOMPUTES or not all_named):
                chosen = worthwhile(self.analysis(short=True), chosen)
            # The last of equal layers, which represents all behind the first, speaks for them.
            last = {where: group for group, where in folded.items()}
            taken = {where for where, group in last.items() if group in chosen}
            for part in (True, False):
                self._segments[part, recompute, all_named] = tuple(
                    one.names
                    for one in all_of
                    if one.key in taken and (not part or one.names in folded)
                )
        return self._segments[key]
