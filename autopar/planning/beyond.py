"""What a program needs in memory beyond what its tables add up to, seen on the folded graph.

Tables add up what every choice keeps. A program has its peak at one moment: gathered units, gradients on their way and what an operator
makes and drops are there as well, once, however many layers there are. With one micro-batch the gradients come as the activations go,
so that of the activations A and the gradients G of all layers only the larger counts:

    beyond = peak - sum of the tables = c - min(A, G)        c from the folded graph's program, each of its layers counted once
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopar.costmodel.memory.peak import certain_bytes, predicted_memory
from autopar.costmodel.step.pricing import LEAST_UNIT
from autopar.search import Solution

from ..order.scheduled import scheduled
from ..sharding.program import build_program
from ..sharding.schedule import Schedule
from .decoding import decode
from .tables import Tables, Variable
from .work import Counts


def bytes_beyond(tables: Tables, solution: Solution, schedule: Schedule, counts: Counts, room: float) -> float:
    """Bytes that a folded solution's program needs beyond (below 0: less than) its tables; its units shrink where it would fill `room`."""
    program = build_program(tables.analysis.graph, decode(tables, solution.choices))
    composite = tables.prices.cluster.backend == "gloo"
    once, shared = _sums(tables, solution, lambda variable: 1 / _count(variable, counts))
    _, all_shared = _sums(tables, solution, lambda variable: 1.0)
    repeated = all_shared - shared if schedule.micro_batches == 1 else 0.0
    found = math.inf
    for unit in dict.fromkeys((schedule.unit_bytes, LEAST_UNIT)):
        plan = scheduled(program, replace(schedule, unit_bytes=min(unit, schedule.unit_bytes)))
        peak = predicted_memory(plan, tables.analysis, optimizer=tables.optimizer, composite=composite).total
        found = min(found, peak - certain_bytes(tables.analysis) - once - repeated)
        if solution.memory + found <= room:
            break
    return found


def _count(variable: Variable, counts: Counts) -> int:
    """For how many equal ones a variable stands."""
    return (counts.operators if variable.what == "operator" else counts.tensors).get(variable.name, 1)


def _sums(tables: Tables, solution: Solution, share: Callable[[Variable], float]) -> tuple[float, float]:
    """The tables' bytes, and the lesser of activations and gradients, of that share of every variable."""
    total, kept, gradients = [0.0], [0.0], [0.0]
    for variable, memory, choice in zip(tables.variables, tables.graph.memory or (), solution.choices, strict=True):
        mine = float(memory[choice]) * share(variable)
        total.append(mine)
        if variable.what == "operator":
            kept.append(mine)
        elif variable.what == "parameter" and (tensor := tables.analysis.graph.tensors[variable.name]).trainable:
            shards = float(tables.spaces[variable.name].divisors()[variable.rows[choice]])
            gradients.append(tables.types.reduced_bytes(tensor) / shards * tables.counts.get(variable.name, 1) * share(variable))
    return math.fsum(total), min(math.fsum(kept), math.fsum(gradients))
