"""The difference between a program's peak memory and the sum of its tables, estimated on the folded
graph.

    beyond = peak - sum of the tables = c - min(A, G)        c: from the folded graph's program,
    every layer once

The tables add up the bytes that each choice keeps. The peak of a program is at one moment. It also
holds gathered units, gradients on their way and an operator's transient bytes, once for any number
of layers. With one micro-batch, gradients G appear as activations A are freed, so only the larger
of both counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopar.costmodel.memory.peak import predicted_memory
from autopar.costmodel.memory.states import certain_bytes
from autopar.costmodel.step.mesh_prices import LEAST_UNIT
from autopar.ir import Role
from autopar.order.scheduled import Scheduled, scheduled
from autopar.planning.model.counts import Counts
from autopar.planning.tables.decoding import decode
from autopar.planning.tables.tables import Tables, Variable
from autopar.search import Solution
from autopar.sharding.program import Redistribute, only_casts
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import Schedule


def bytes_beyond(
    tables: Tables, solution: Solution, schedule: Schedule, counts: Counts, room: float
) -> float:
    """The peak bytes of a folded solution's program minus the sum of its tables (may be negative).

    The units of parameters are made smaller if the peak would exceed `room`.
    """
    program = build_program(tables.analysis.graph, decode(tables, solution.choices))
    cluster = tables.prices.cluster
    # The folded program has every layer once, so its peak is compared with sums that have, too.
    once, shared = _sums(tables, solution, lambda variable: 1 / _count(variable, counts))
    _, all_shared = _sums(tables, solution, lambda variable: 1.0)
    # With several micro-batches, the gradients of the first meet all activations of the next: both
    # count in full.
    repeated = all_shared - shared if schedule.micro_batches == 1 else 0.0
    least = math.inf
    for unit in dict.fromkeys((schedule.unit_bytes, LEAST_UNIT)):
        plan = scheduled(program, replace(schedule, unit_bytes=min(unit, schedule.unit_bytes)))
        peak = predicted_memory(
            plan,
            tables.analysis,
            optimizer=tables.optimizer,
            composite=cluster.backend == "gloo",
            framework=cluster.framework,
        ).total + _copies_of_other_layers(plan, counts)
        least = min(least, peak - certain_bytes(tables.analysis) - once - repeated)
        if solution.memory + least <= room:
            break
    return least


def _copies_of_other_layers(plan: Scheduled, counts: Counts) -> float:
    """Bytes of copies that stay for a step, and that neither tables nor the folded program count.

    Under ZeRO 3 tables take all copies of parameters for released, but those that are only cast
    stay.
    """
    if plan.schedule.gathered != "per_pass":
        return 0.0
    program = plan.program
    mesh = program.assignment.mesh.shape
    tensors = program.graph.tensors
    return math.fsum(
        (counts.tensors.get(step.tensor, 1) - 1)
        * local_bytes(step.chain[-1], tensors[step.tensor].bytes, mesh)
        for step in program.steps
        if isinstance(step, Redistribute)
        and tensors[step.tensor].role is Role.PARAMETER
        and only_casts(step)
    )


def _count(variable: Variable, counts: Counts) -> int:
    """The number of equal variables of the whole graph that this one represents."""
    return (counts.operators if variable.what == "operator" else counts.tensors).get(
        variable.name, 1
    )


def _sums(
    tables: Tables, solution: Solution, share: Callable[[Variable], float]
) -> tuple[float, float]:
    """The tables' bytes, and the smaller of activations and gradients, with every variable weighted
    by `share`.
    """
    total = [0.0]
    activations = [0.0]
    gradients = [0.0]
    for variable, memory, choice in zip(
        tables.variables, tables.graph.memory or (), solution.choices, strict=True
    ):
        mine = float(memory[choice]) * share(variable)
        total.append(mine)
        if variable.what == "operator":
            activations.append(mine)
        elif (
            variable.what == "parameter"
            and (tensor := tables.analysis.graph.tensors[variable.name]).trainable
        ):
            shards = float(tables.spaces[variable.name].divisors()[variable.rows[choice]])
            gradients.append(
                tables.types.reduced_bytes(tensor)
                / shards
                * tables.counts.get(variable.name, 1)
                * share(variable)
            )
    return math.fsum(total), min(math.fsum(activations), math.fsum(gradients))
