"""The cost graph: variables with a few choices each, tables of costs, and solutions."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .tables import SMALL, Numbers, Table, numbered

Edge = tuple[int, int]
FLOAT = np.dtype(np.float64)


class Infeasible(ValueError):
    """No assignment of finite cost fits the memory limit.

    `minimum_memory`: bytes of the assignment that needs least. `limit`: the limit in bytes.
    """

    def __init__(self, minimum_memory: float, limit: float) -> None:
        super().__init__(
            f"no assignment fits {limit:.6g} bytes: the smallest needs {minimum_memory:.6g}; raise "
            "the limit or add choices"
        )
        self.minimum_memory = minimum_memory
        self.limit = limit


class NoAssignment(ValueError):
    """Every assignment is forbidden, since each contains an infinite entry."""

    def __init__(self) -> None:
        super().__init__(
            "every assignment costs infinity: the forbidden (infinite) entries leave no choice"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostGraph:
    """Variables with a cost for each choice and each pair of choices; their sum is minimised.

        sum over v of unary[v][x_v]  +  sum over edges (u, v) of edges[u, v][x_u, x_v]

    An infinite entry forbids its choices. `memory`: bytes of each choice, added up over the
    variables. `digits`: each choice's component on each mesh axis (0: not split). `derived`: made
    of a graph that was checked, so that it is not checked itself.

    >>> edges = {(0, 1): np.array([[3.0, 2.0], [0.0, 9.0]])}
    >>> graph = CostGraph(sizes=(2, 2), unary=(np.array([0.0, 1.0]), np.zeros(2)), edges=edges)
    >>> graph.cost((1, 0))
    1.0
    """

    sizes: tuple[int, ...]
    unary: tuple[Table, ...]
    edges: Mapping[Edge, Table]
    memory: tuple[Table, ...] | None = None
    digits: tuple[NDArray[np.integer], ...] | None = None
    names: tuple[str, ...] = ()
    derived: bool = field(default=False, repr=False)
    _numbers: Numbers | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.derived:
            self._check()

    @property
    def numbers(self) -> Numbers:
        """The numbers of the tables, which are found once."""
        if self._numbers is None:
            self.is_numbered(numbered(self.unary, self.memory, self.edges.values()))
        assert self._numbers is not None
        return self._numbers

    def is_numbered(self, numbers: Numbers) -> None:
        """Take the numbers from whoever made the tables."""
        object.__setattr__(self, "_numbers", numbers)

    def _check(self) -> None:
        count = len(self.sizes)
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"every variable needs a choice, got sizes {self.sizes}")
        if self.names and len(self.names) != count:
            raise ValueError(f"{len(self.names)} names for {count} variables")
        costs = _Forms()
        self._check_rows("unary", self.unary, costs)
        for (u, v), table in self.edges.items():
            if not 0 <= u < v < count:
                raise ValueError(f"edge ({u}, {v}) is not an ordered pair of the {count} variables")
            costs.check(f"edge ({u}, {v})", table, (self.sizes[u], self.sizes[v]))
        # A NaN fails every comparison, and so this one: one test finds both.
        costs.entries(
            lambda entries: bool(entries.min() > -math.inf), "holds a NaN or minus infinity"
        )
        if self.memory is not None:
            held_bytes = _Forms()
            self._check_rows("memory", self.memory, held_bytes)
            held_bytes.entries(
                lambda held: bool(held.min() >= 0.0 and held.max() < math.inf),
                "must be finite and not negative",
            )
        if self.digits is not None:
            self._check_digits(self.digits)

    def _check_rows(self, what: str, tables: tuple[Table, ...], forms: "_Forms") -> None:
        if len(tables) != len(self.sizes):
            raise ValueError(f"{len(tables)} {what} tables for {len(self.sizes)} variables")
        for v, table in enumerate(tables):
            forms.check(f"{what} of variable {v}", table, (self.sizes[v],))

    def _check_digits(self, digits: tuple[NDArray[np.integer], ...]) -> None:
        if len(digits) != len(self.sizes):
            raise ValueError(f"{len(digits)} digit tables for {len(self.sizes)} variables")
        axes = {table.shape[1:] for table in digits}
        if len(axes) > 1 or any(table.ndim != 2 for table in digits):
            raise ValueError("every digit table needs the shape [size, axes] with the same axes")
        for v, table in enumerate(digits):
            if len(table) != self.sizes[v] or table.dtype.kind not in "iu":
                raise ValueError(
                    f"digits of variable {v} must be {self.sizes[v]} rows of integers, got "
                    f"{table.dtype} {table.shape}"
                )

    def cost(self, choices: Sequence[int]) -> float:
        """Seconds of an assignment (one choice index for each variable)."""
        self._check_choices(choices)
        terms = [table.item(c) for table, c in zip(self.unary, choices, strict=True)]
        terms += [table.item(choices[u], choices[v]) for (u, v), table in self.edges.items()]
        return math.fsum(terms)

    def memory_of(self, choices: Sequence[int]) -> float:
        """Bytes of an assignment; 0 when the graph has no memory tables."""
        self._check_choices(choices)
        if self.memory is None:
            return 0.0
        return math.fsum([table.item(c) for table, c in zip(self.memory, choices, strict=True)])

    def _check_choices(self, choices: Sequence[int]) -> None:
        if len(choices) != len(self.sizes) or any(
            not 0 <= c < size for c, size in zip(choices, self.sizes, strict=True)
        ):
            raise ValueError(f"{len(choices)} choices do not index the {len(self.sizes)} variables")


class _Forms:
    """Checks the form of tables one by one, and then their entries, those of small ones at once.

    `known`: the tables so far, by their identities; equal variables mostly share one.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, Table]] = {}

    def check(self, what: str, table: Table, shape: tuple[int, ...]) -> None:
        """Check the form of a table, and note it for the check of the entries."""
        known = self.known.get(id(table))
        if known is not None and table.shape == shape:
            return
        if not isinstance(table, np.ndarray) or table.dtype != FLOAT or table.shape != shape:
            got = type(table).__name__
            if isinstance(table, np.ndarray):
                got = f"{table.dtype} {table.shape}"
            raise ValueError(f"{what} must be a float64 array of shape {shape}, got {got}")
        self.known[id(table)] = (what, table)

    def entries(self, valid: Callable[[Table], bool], wrong: str) -> None:
        """Check the entries of small tables at once, of each only where that fails."""
        small = [table.ravel() for _, table in self.known.values() if table.size <= SMALL]
        are_valid = not small or valid(np.concatenate(small))
        for what, table in self.known.values():
            if not (are_valid and table.size <= SMALL) and not valid(table):
                raise ValueError(f"{what} {wrong}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The origin of a bound, sufficient to write a certificate of it.

    The tests write and check such certificates. `kind`: "messages" (of an elimination),
    "messages+price" (the same, with a price of a byte), "minima" (the sum of the least entries of
    all tables), or "enumeration" (a search found nothing better; its messages, if any, prove a
    lower bound).
    """

    kind: str
    limit: float | None = None
    price: float = 0.0
    max_entries: int = 0
    pruned: bool = False


UNPROVEN = Proof(kind="enumeration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment with its cost and memory, and a bound that no other one undercuts.

    The bound holds for the assignments within the limit, if there is one. `cost` and `lower_bound`
    are in seconds, `memory` is in bytes.
    """

    choices: tuple[int, ...]
    cost: float
    memory: float
    lower_bound: float
    method: str
    proof: Proof = field(default=UNPROVEN, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.lower_bound <= self.cost:
            raise ValueError(f"the bound {self.lower_bound} is above the cost {self.cost}")

    @property
    def gap(self) -> float:
        """The relative distance to the bound; 0 when the solution is certainly optimal."""
        return (self.cost - self.lower_bound) / max(abs(self.cost), sys.float_info.min)


def solution(
    graph: CostGraph,
    choices: Sequence[int],
    *,
    lower_bound: float,
    method: str,
    proof: Proof = UNPROVEN,
) -> Solution:
    """Price `choices`; a bound that equals the cost but for rounding becomes the cost."""
    # Bounds are summed in another order than costs, so an optimum's two differ in the last digits.
    cost = graph.cost(choices)
    if cost - lower_bound <= 1e-12 * abs(cost):
        lower_bound = cost
    plain = tuple(int(choice) for choice in choices)
    return Solution(
        choices=plain,
        cost=cost,
        memory=graph.memory_of(plain),
        lower_bound=lower_bound,
        method=method,
        proof=proof,
    )


def memory_tables(graph: CostGraph) -> tuple[Table, ...]:
    """The memory tables, which a memory limit needs."""
    if graph.memory is None:
        raise ValueError("a memory limit needs a cost graph with memory tables")
    return graph.memory
