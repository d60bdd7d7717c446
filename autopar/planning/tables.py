"""The priced tables of a cost graph, the meaning of its variables, and the inputs that the tables were made from.

Variables: a strategy for every operator that the search decides on, a storage layout for every parameter, a fan-out for
every tensor with several readers (the one layout from which they take it), and the layout of every output. Edges:
redistributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.layout_space import LayoutSpace
from autopar.costmodel.step.pricing import MeshPrices
from autopar.search import CostGraph

from ..ir import Graph, Tensor
from ..sharding.analysis import Analysis
from ..sharding.candidates import Strategies
from ..sharding.layout import Layout
from ..sharding.schedule import PLAIN, Types
from .multiplicities import Multiplicities

T = TypeVar("T")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Known:
    """Parts of tables, by keys of all that they depend on.

    `keep`: the arrays whose identity is in a key, so that no other array gets their `id`. `of_parameters`: the parts
    that are equal for any number of micro-batches on the same mesh (None: they are kept here).
    """

    parts: dict[object, Any] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)
    of_parameters: Known | None = None

    def once(self, key: object, make: Callable[[], T]) -> T:
        """The value of `make`, computed once for each key."""
        if key not in self.parts:
            self.parts[key] = make()
        return cast(T, self.parts[key])

    def lasting(self, codes: Ints) -> int:
        """A number for the content of an array that stays alive here, for keys in `of_parameters`."""
        other = self.of_parameters or self
        return self.once(("lasting of", id(codes)), lambda: other.once(("lasting", codes.tobytes()), lambda: len(other.parts)))

    def content(self, codes: Ints) -> int:
        """A number for the content of an array that stays alive; each array is read once."""
        return self.once(("content of", id(codes)), lambda: self.once(("content", codes.tobytes()), lambda: len(self.parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The inputs of tables; `again`: the recomputed operators."""

    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    work: Multiplicities
    types: Types
    known: Known
    spaces: Mapping[str, LayoutSpace]
    again: frozenset[str]

    @property
    def graph(self) -> Graph:
        """The model, or one micro-batch of it."""
        return self.analysis.graph

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the mesh's axes."""
        return self.prices.mesh.shape

    def wider(self, tensor: Tensor) -> float:
        """Bytes of the gradient for each byte of the value."""
        return self.types.reduced_bytes(tensor) / tensor.bytes if tensor.bytes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable of the cost graph; `what`: operator, parameter, fan-out or output; `name`: of the operator or tensor.

    `rows`: the choices, as strategy indices of an operator, otherwise as codes of layouts. `host`: bytes of a
    parameter's optimizer state in host memory, for each choice (None: no choice has any).
    """

    what: str
    name: str
    rows: Ints
    host: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A cost graph with the meaning of its variables.

    `counts`: the number of tensors that a tensor represents, if more than one. `aside`: on the edges from a parameter,
    the seconds that are not communication (see `handling`); `each`: their part in each further pass. `host_room`: bytes
    that a solution may leave in host memory. `chains`: redistributions known from earlier solutions of such tables.
    """

    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    graph: CostGraph
    variables: tuple[Variable, ...]
    strategies: Mapping[str, Strategies]
    spaces: Mapping[str, LayoutSpace]
    counts: Mapping[str, int]
    aside: Mapping[tuple[int, int], Floats] = field(default_factory=dict)
    each: Mapping[tuple[int, int], Floats] = field(default_factory=dict)
    host_room: float = math.inf
    types: Types = PLAIN.types
    chains: dict[object, tuple[Layout, ...]] = field(default_factory=dict)

    def least_kept(self) -> float:
        """The least bytes that operators keep, over all choices."""
        return self._least("operator")

    def least_stored(self) -> float:
        """The least bytes of parameters, gradients and optimizer state on the device; no program needs less."""
        return self._least("parameter")

    def least_updates(self) -> float:
        """Seconds of the optimizer's step whatever is chosen."""
        unary = zip(self.variables, self.graph.unary, strict=True)
        return math.fsum(float(seconds.min()) for variable, seconds in unary if variable.what == "parameter")

    def _least(self, what: str) -> float:
        memory = zip(self.variables, self.graph.memory or (), strict=False)
        return math.fsum(float(taken.min()) for variable, taken in memory if variable.what == what)

    def lighter(self, spared: Callable[[Tensor, Ints], Floats]) -> Tables:
        """Tables in which trained parameters take so many bytes less than they do, by the tensor and the shards of its layouts."""
        known, memory = dict[object, Floats](), []
        for variable, kept in zip(self.variables, self.graph.memory or (), strict=True):
            tensor = self.analysis.graph.tensors[variable.name] if variable.what == "parameter" else None
            if tensor is not None and tensor.trainable:
                count = self.counts.get(variable.name, 1)
                key = (id(kept), id(variable.rows), tensor.shape, tensor.dtype, count)
                if key not in known:
                    shards = self.spaces[variable.name].divisors()[variable.rows]
                    known[key] = np.maximum(kept - count * spared(tensor, shards), 0.0)
                kept = known[key]
            memory.append(kept)
        return replace(self, graph=replace(self.graph, memory=tuple(memory)))

    def host_of(self, choices: Sequence[int]) -> float:
        """Bytes that an assignment leaves in host memory."""
        return math.fsum(float(v.host[choice]) for v, choice in zip(self.variables, choices, strict=True) if v.host is not None)
