"""The priced tables of a cost graph, the meaning of its variables, and what they are made from.

Variables:

    operator     a strategy for every operator that the search decides on, or region of such
    parameter    the storage layout of every parameter
    fan-out      the one layout from which the readers of a tensor take it, if there are several
    output       the layout of every output

Edges: redistributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.redistribution.layout_space import LayoutSpace
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Graph, Tensor
from autopar.planning.space import Multiplicities
from autopar.search import CostGraph
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout
from autopar.sharding.redistribution import ONCE, Often
from autopar.sharding.schedule import PLAIN, Types
from autopar.sharding.strategies import Strategies

T = TypeVar("T")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Codes of layouts in an array; `Known.codes` makes one object of equal arrays.

    Compared as an object, so that a key is hashed without reading the array again.
    """

    array: Ints


@dataclass(slots=True, kw_only=True)
class Known:
    """Parts of tables, by keys of all that they depend on.

    A key is made of values: numbers, names, and objects of which equal ones are made only once.
    `of_mesh`: the parts that are equal for any number of micro-batches on the same mesh (None: they
    are kept here).
    """

    parts: dict[object, Any] = field(default_factory=dict)
    of_mesh: Known | None = None

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return the value of `make`, computed once for each key."""
        # A result may be None, so its absence is what is looked for.
        if key not in self.parts:
            self.parts[key] = make()
        return cast(T, self.parts[key])

    @property
    def on_mesh(self) -> Known:
        """The parts that do not depend on the number of micro-batches."""
        return self.of_mesh or self

    def codes(self, array: Ints) -> Codes:
        """Return the one object for all arrays of these codes, whatever they are codes of."""
        return self.on_mesh.once(("codes", array.tobytes()), lambda: Codes(array))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Arrays [choices] of what a variable chooses among; equal variables share one object.

    `rows`: as of `Variable`. `seconds`, `memory`: seconds of a step, and bytes of a device.
    `digits`: array [choices, axes], a kind or option for each axis. `host`: as of `Variable`.
    """

    rows: Ints
    seconds: Floats
    memory: Floats
    digits: NDArray[np.integer]
    host: Floats | None = None

    def where(self, allowed: NDArray[np.bool_]) -> Choices:
        """Return the choices that are allowed."""
        return Choices(
            rows=self.rows[allowed],
            seconds=self.seconds[allowed],
            memory=self.memory[allowed],
            digits=self.digits[allowed],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The inputs of tables; `recomputed`: the operators that run a second time."""

    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    work: Multiplicities
    types: Types
    known: Known
    spaces: Mapping[str, LayoutSpace]
    recomputed: frozenset[str]

    @property
    def graph(self) -> Graph:
        """The model, or one micro-batch of it."""
        return self.analysis.graph

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the mesh's axes."""
        return self.prices.mesh.shape

    @property
    def matrices(self) -> frozenset[str]:
        """The parameters that the optimizer updates as whole matrices."""
        return self.analysis.updated_whole(self.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable of the cost graph.

    `what`: operator, parameter, fan-out or output. `name`: of the operator or tensor. `rows`: the
    choices, as strategy indices of an operator, otherwise as codes of layouts. `host`: bytes of a
    parameter's optimizer state in host memory, for each choice (None: no choice has any).
    `members`: the operators that an operator's choice decides, with itself.
    """

    what: str
    name: str
    rows: Ints
    host: Floats | None = None
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """A cost graph with the meaning of its variables.

    `offered`: the choices of each variable, of which the graph has the seconds and bytes. `counts`:
    the number of tensors that a tensor represents, if more than one. `aside`: on the edges from a
    parameter, the seconds that are not communication (see `handling`). `each`: their part in each
    further pass. `host_room`: bytes that a solution may leave in host memory. `often`: how often
    a parameter and its gradient travel in a step. `chains`: redistributions known from earlier
    solutions of such tables.
    """

    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    graph: CostGraph
    variables: tuple[Variable, ...]
    offered: tuple[Choices, ...]
    strategies: Mapping[str, Strategies]
    spaces: Mapping[str, LayoutSpace]
    counts: Mapping[str, int]
    aside: Mapping[tuple[int, int], Floats] = field(default_factory=dict)
    each: Mapping[tuple[int, int], Floats] = field(default_factory=dict)
    host_room: float = math.inf
    types: Types = PLAIN.types
    often: Often = ONCE
    chains: dict[object, tuple[Layout, ...]] = field(default_factory=dict)

    def least_stored(self) -> float:
        """Return the least bytes of parameters with gradients and state, over all choices."""
        memory = zip(self.variables, self.graph.memory or (), strict=False)
        return math.fsum(
            float(taken.min()) for variable, taken in memory if variable.what == "parameter"
        )

    def least_updates(self) -> float:
        """Return the seconds of the optimizer's step, whatever is chosen."""
        unary = zip(self.variables, self.graph.unary, strict=True)
        return math.fsum(
            float(seconds.min()) for variable, seconds in unary if variable.what == "parameter"
        )

    def lighter(self, spared: Callable[[Tensor, Ints], Floats]) -> Tables:
        """Return tables in which trained parameters take fewer bytes.

        `spared`: gives the bytes that each layout takes less, by the tensor and the shards of its
        layouts.
        """
        # Equal parameters stay one object, so that the search still recognises them.
        lightened = dict[object, Choices]()
        offered = []
        for variable, choices in zip(self.variables, self.offered, strict=True):
            tensor = self.analysis.graph.tensors.get(variable.name)
            if variable.what != "parameter" or tensor is None or not tensor.trainable:
                offered.append(choices)
                continue
            shards = self.spaces[variable.name].divisors()[variable.rows]
            less = self.counts.get(variable.name, 1) * spared(tensor, shards)
            key = (choices, less.tobytes())
            if key not in lightened:
                memory = np.maximum(choices.memory - less, 0.0)
                lightened[key] = replace(choices, memory=memory)
            offered.append(lightened[key])
        memory_tables = tuple(choices.memory for choices in offered)
        graph = replace(self.graph, memory=memory_tables)
        return replace(self, graph=graph, offered=tuple(offered))

    def host_of(self, choices: Sequence[int]) -> float:
        """Return the bytes that an assignment leaves in host memory."""
        return math.fsum(
            float(v.host[choice])
            for v, choice in zip(self.variables, choices, strict=True)
            if v.host is not None
        )
