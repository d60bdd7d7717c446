"""The composition: a graph and a cluster become priced tables, a solver picks, and the cheapest mesh's choice is the `Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from autopar.costmodel import Cluster, bind_axes
from autopar.costmodel.estimate import Estimate, collective_seconds, estimate
from autopar.costmodel.pricing import MeshPrices, optimizer_named
from autopar.search import SEARCHES, Infeasible, NoAssignment, Solution, solve

from . import __version__
from .decoding import decode
from .errors import NoPlanFits, UsageError, unknown
from .ir import Graph, Role
from .plan import Plan, as_text
from .plan_parts import (
    AxisSpec,
    CollectivePlan,
    InputSpec,
    ModelSpec,
    OperatorPlan,
    ParameterPlan,
    Predicted,
    Provenance,
    RulePlan,
)
from .sharding.analysis import Analysis, analyse
from .sharding.layout import format_layout
from .sharding.mesh import Axis, Mesh, factorisations
from .sharding.program import Assignment, Program, build_program
from .sharding.rules.found import found_in
from .tables import Limits, Tables, build_tables

MAX_AXES = 3
MEMORY_TRIES = 6
"""How often the search's limit is lowered when the program's exact memory is above what the tables added up to."""
THRIFTY = (1 + 1e-9, 1.1, 1.25, 1.5, 2.0)
"""Limits, as multiples of the least memory that the tables add up to, among whose solutions the thriftiest program is taken."""
EVALUATED = 2
"""How many of the cheapest meshes have their programs built and priced exactly."""

Progress = Callable[[int, int, str], None]
"""Called as (done, of, what)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan for: `memory` in bytes per device (None: the cluster's), `mesh` to fix one, `limits` from pins."""

    cluster: Cluster
    train: bool = True
    optimizer: str = "adamw"
    method: str = "dynamic_programming"
    memory: float | None = None
    mesh: Mesh | None = None
    limits: Callable[[Analysis, Mesh], Limits] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        optimizer_named(self.optimizer)
        if self.method not in SEARCHES:
            raise UsageError(unknown("search method", self.method, SEARCHES))
        if self.memory is not None and self.memory <= 0:
            raise UsageError(f"the memory limit is {self.memory} bytes; it must be above 0")

    @property
    def limit(self) -> float:
        """Bytes that a plan may fill on a device."""
        return self.memory if self.memory is not None else self.cluster.device.usable_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The priced tables of one mesh and their solution."""

    tables: Tables
    solution: Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best choice on one mesh."""

    tables: Tables
    solution: Solution
    assignment: Assignment
    program: Program
    estimate: Estimate

    @property
    def rank(self) -> tuple[float, int, int]:
        """Order among meshes: time, then collectives, then axes."""
        return (round(self.estimate.step, 12), len(self.program.collectives()), len(self.assignment.mesh.axes))


def name_axes(cluster: Cluster, sizes: tuple[int, ...], levels: Iterable[str]) -> Mesh:
    """A mesh whose axes are named after what they join: gpu (rank on CPUs) inside, node across, numbered when several."""
    inner = cluster.levels[0].name
    unit = "gpu" if cluster.backend == "nccl" else "rank"
    words = [unit if level in (inner, "device") else "node" if ":" not in level else "device" for level in levels]
    names = [f"{word}{words[:i].count(word)}" if words.count(word) > 1 else word for i, word in enumerate(words)]
    return Mesh(axes=tuple(Axis(name=n, size=s, level=level) for n, s, level in zip(names, sizes, levels, strict=True)))


def meshes(cluster: Cluster) -> list[Mesh]:
    """Every factorisation of the devices with up to three axes, bound to levels."""
    bound = ((sizes, bind_axes(cluster, sizes)) for sizes in factorisations(cluster.devices, MAX_AXES))
    return [name_axes(cluster, sizes, levels) for sizes, levels in bound if levels is not None]


def search_plan(graph: Graph, request: Request, *, progress: Progress | None = None) -> Plan:
    """The cheapest plan of `graph` over all meshes of the cluster; `NoPlanFits` names the smallest memory that would do.

    Every mesh is solved; the programs of the `EVALUATED` cheapest solutions are priced to the last collective.
    """
    analysis = analyse(graph, train=request.train)
    candidates = [request.mesh] if request.mesh is not None else meshes(request.cluster)
    solved: list[Solved] = []
    bounds: list[float] = []
    fits = True
    for index, mesh in enumerate(candidates):
        if progress:
            progress(index, len(candidates), str(mesh))
        try:
            solved.append(solve_mesh(analysis, mesh, request))
        except Infeasible:
            fits = False
            continue
        except NoAssignment as error:
            if len(candidates) == 1:
                raise UsageError(f"on the mesh {mesh} the pins leave no strategy for some operator") from error
            continue
        bounds.append(solved[-1].solution.lower_bound)
        solved = sorted(solved, key=lambda s: s.solution.cost)[:EVALUATED]
    if progress:
        progress(len(candidates), len(candidates), "done")
    if not solved and fits:
        raise UsageError("the pins leave no strategy for some operator on any mesh of these devices")
    best = _best(solved, analysis, candidates, request)
    return as_plan(best, request, lower_bound=min([*bounds, best.solution.cost]))


def _best(solved: list[Solved], analysis: Analysis, candidates: list[Mesh], request: Request) -> Found:
    """The best program among the solutions; where none fits the memory, the first that does on any mesh."""
    failures: list[Infeasible] = []
    found: list[Found] = []
    for choice in solved:
        try:
            found.append(fit(choice, request))
        except Infeasible as error:
            failures.append(error)
    for mesh in () if found else candidates:
        try:
            found.append(smallest(solve_mesh(analysis, mesh, request, limit=math.inf), request))
        except Infeasible as error:
            failures.append(error)
        except NoAssignment:
            continue
    if not found:
        raise _no_plan(failures, request)
    return min(found, key=lambda f: f.rank)


def _no_plan(failures: list[Infeasible], request: Request) -> NoPlanFits:
    minimum = min(error.minimum_memory for error in failures)
    limit = request.limit
    return NoPlanFits(
        f"no plan fits {_size(limit)} per device on {request.cluster.devices} devices; the smallest that would do is "
        f"{_size(minimum)}. Give more devices or memory, a smaller --batch, or --optimizer sgd.",
        minimum=minimum,
        limit=limit,
    )


def _size(nbytes: float) -> str:
    """Bytes rounded up to three digits, so that the size named is enough."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{math.ceil(nbytes / unit * 1000) / 1000:.3f} {name}"
    return f"{math.ceil(nbytes)} bytes"


def solve_mesh(analysis: Analysis, mesh: Mesh, request: Request, *, limit: float | None = None) -> Solved:
    """Build the tables of one mesh and solve them within the memory; raises `Infeasible` when nothing fits."""
    prices = MeshPrices(cluster=request.cluster, mesh=mesh)
    limits = request.limits(analysis, mesh) if request.limits else None
    tables = build_tables(analysis, prices, optimizer=request.optimizer, limits=limits)
    # Inputs and constants lie whole on every device, whatever the plan; the tables count the rest.
    always = sum(t.bytes for t in analysis.graph.tensors.values() if t.role in (Role.CONSTANT, Role.INPUT))
    allowed = max(request.limit - always, 0.0) if limit is None else limit
    return Solved(tables=tables, solution=_solve(tables, request.method, allowed))


def best_on_mesh(analysis: Analysis, mesh: Mesh, request: Request) -> Found:
    """The best program on one mesh; raises `Infeasible` when none fits."""
    try:
        return fit(solve_mesh(analysis, mesh, request), request)
    except Infeasible:
        return smallest(solve_mesh(analysis, mesh, request, limit=math.inf), request)


def fit(choice: Solved, request: Request) -> Found:
    """The program of a solution; where it needs more memory than the tables added up to, that of a thriftier solution."""
    tables, solution = choice.tables, choice.solution
    allowed = request.limit
    for _ in range(MEMORY_TRIES):
        found = evaluate(tables, solution)
        over = found.estimate.memory.total - request.limit
        if over <= 0:
            return found
        allowed = min(allowed, tables.graph.memory_of(solution.choices)) - over
        try:
            solution = _solve(tables, request.method, allowed)
        except Infeasible:
            break
    return smallest(choice, request)


def smallest(choice: Solved, request: Request) -> Found:
    """The plan of least memory, or the first that fits; `Infeasible` if none does.

    The tables add memory up operator by operator, the program has its peak at one moment: thrifty solutions are tried in turn.
    """
    try:
        solution = _solve(choice.tables, request.method, 0.0)
        limits: tuple[float, ...] = ()
    except Infeasible as error:
        limits = tuple(error.minimum_memory * factor for factor in THRIFTY)
        solution = _solve(choice.tables, request.method, limits[0])
    found = evaluate(choice.tables, solution)
    for limit in limits[1:]:
        if found.estimate.memory.total <= request.limit:
            break
        other = evaluate(choice.tables, _solve(choice.tables, request.method, limit))
        found = min(found, other, key=lambda f: f.estimate.memory.total)
    if found.estimate.memory.total <= request.limit:
        return found
    raise Infeasible(found.estimate.memory.total, request.limit)


def _solve(tables: Tables, method: str, limit: float) -> Solution:
    try:
        return solve(tables.graph, method=method, memory_limit=limit if limit < math.inf else None)
    except (Infeasible, NoAssignment):
        raise
    except ValueError as error:
        raise UsageError(f"--search {method}: {error}") from error


def evaluate(tables: Tables, solution: Solution) -> Found:
    """Decode a solution and price its program."""
    assignment = decode(tables, solution.choices)
    program = build_program(tables.analysis.graph, assignment)
    figures = estimate(program, tables.analysis, tables.prices, optimizer=tables.optimizer)
    return Found(tables=tables, solution=solution, assignment=assignment, program=program, estimate=figures)


def _collectives(found: Found) -> Iterator[CollectivePlan]:
    """The program's collectives with their prices."""
    prices = found.tables.prices
    for c in found.program.collectives():
        axis = prices.mesh.axes[c.axis].name
        yield CollectivePlan(phase=c.phase, kind=c.kind, axis=axis, nbytes=c.nbytes, seconds=collective_seconds(c, prices), tensor=c.tensor)


def as_plan(found: Found, request: Request, *, lower_bound: float) -> Plan:
    """Write down what was found."""
    analysis, assignment, figures = found.tables.analysis, found.assignment, found.estimate
    graph = analysis.graph
    inputs = {name: InputSpec(shape=graph.tensors[name].shape, dtype=graph.tensors[name].dtype) for name in graph.inputs}
    operators = {
        op.name: OperatorPlan(
            kind=op.kind,
            fingerprint=graph.operator_fingerprint(op),
            strategy=tuple(o.name for o in assignment.decisions[op.name].options),
            inputs=tuple(zip(op.inputs, map(format_layout, assignment.decisions[op.name].inputs), strict=True)),
            outputs=tuple(zip(op.outputs, map(format_layout, assignment.decisions[op.name].outputs), strict=True)),
        )
        for op in analysis.warm
    }
    parameters = {
        t.name: ParameterPlan(shape=t.shape, dtype=t.dtype, storage=format_layout(assignment.storage[t.name])) for t in graph.parameters
    }
    memory = figures.memory
    cost = found.solution.cost
    return Plan(
        model=ModelSpec(
            name=graph.name, fingerprint=graph.fingerprint(), mode="train" if analysis.train else "infer", optimizer=request.optimizer,
            loss=graph.loss if analysis.train else None, inputs=inputs,
        ),
        cluster=request.cluster.name,
        mesh=tuple(AxisSpec(name=a.name, size=a.size, level=a.level) for a in assignment.mesh.axes),
        operators=operators,
        parameters=parameters,
        outputs=as_text(assignment.outputs),
        redistributions={name: tuple(tuple(map(format_layout, chain)) for chain in chains) for name, chains in assignment.chains.items()},
        collectives=tuple(_collectives(found)),
        rules=tuple(RulePlan.model_validate(asdict(rule)) for rule in found_in(graph)),
        replicated=tuple(sorted(graph.replicated)),
        predicted=Predicted(
            step=figures.step, forward=figures.forward, backward=figures.backward, update=figures.update,
            communication=figures.communication, overlapped=figures.overlapped, memory=memory.total, memory_parts=memory.parts,
        ),
        provenance=Provenance(
            autopar=__version__, method=found.solution.method, seed=request.seed, objective=cost, lower_bound=lower_bound,
            gap=max(0.0, (cost - lower_bound) / cost) if cost > 0 else 0.0,
        ),
    )  # fmt: skip
