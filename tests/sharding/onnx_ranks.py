"""Node tests of onnx on two real ranks: every operator split where it can be, the outputs compared
with the recorded ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopar.ir import Graph, Role
from autopar.ir.graph import DTYPE_BYTES
from autopar.runtime.execution.engine import Engine
from autopar.runtime.launch import run_ranks
from autopar.runtime.random_numbers.draw_state import Draws
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.candidates import options_of, strategies_of
from autopar.sharding.equal_parts import split_variants
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.notation import Rule
from autopar.sharding.program import Assignment, Decision, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import cheapest_chain
from autopar.sharding.rules import RULES, Call, rule_of
from tests.frontends.onnx.lowering.node_report import compare
from tests.frontends.onnx.lowering.node_tests import NodeTest
from tests.sharding.onnx_samples import Loaded, load

PAIR = Mesh(axes=(Axis(name="pair", size=2),))
TIMEOUT = 600.0


class NotSplit(Exception):
    """Nothing of a node test can be split over two ranks; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A node test with a program for two ranks in which something is split."""

    test: NodeTest
    loaded: Loaded
    program: Program


def split(test: NodeTest, seed: int = 0) -> Split:
    """A node test with a split chosen by chance for every operator that has one; `NotSplit` where
    none has.
    """
    loaded = load(test)
    graph = loaded.graph
    if not graph.operators:
        raise NotSplit("nothing is left to compute when constants are folded")
    known = [op for op in graph.operators if op.kind in RULES]
    rules = {op.name: rule_of(Call.of(graph, op)) for op in known}
    variants = split_variants(graph, rules)[0]
    decisions = _decisions(graph, rules, variants, random.Random(f"{seed} {test.name}"))
    if not any(
        option.factor >= 0 for decision in decisions.values() for option in decision.options
    ):
        raise NotSplit(_why(rules.values()))
    return Split(
        test=test, loaded=loaded, program=build_program(graph, _assignment(graph, decisions))
    )


def _why(rules: Iterable[Rule]) -> str:
    sizes = [rule.factors[f].size for rule in rules for f in rule.splittable()]
    if not sizes:
        return "its operators are computed whole"
    return (
        "no dim that can be split has an even size"
        if max(sizes) > 1
        else "no dim that can be split has more than one element"
    )


def _decisions(
    graph: Graph,
    rules: Mapping[str, Rule],
    variants: Mapping[str, Mapping[int, tuple[int, ...]]],
    rng: random.Random,
) -> dict[str, Decision]:
    whole = replicated(1)
    results = {}
    for op in graph.operators:
        rule = rules.get(op.name)
        if rule is None:
            results[op.name] = Decision(
                options=(),
                rule=None,
                inputs=(whole,) * len(op.inputs),
                outputs=(whole,) * len(op.outputs),
            )
            continue
        options = options_of(Call.of(graph, op), rule, frozenset(), variants[op.name])
        strategies = strategies_of(rule, options, PAIR.shape)
        splits = [
            i for i, (choice,) in enumerate(strategies.choices) if options[choice].factor >= 0
        ]
        index = rng.choice(splits) if splits else 0
        inputs, outputs = strategies.layouts(index)
        results[op.name] = Decision(
            options=tuple(options[o] for o in strategies.choices[index]),
            rule=rule,
            inputs=inputs,
            outputs=outputs,
        )
    return results


def _flat(kind: str, axis: int, nbytes: int) -> float:
    return 1e-6 + nbytes * 1e-9


def _assignment(graph: Graph, decisions: Mapping[str, Decision]) -> Assignment:
    """One chain for every layout that a reader needs; parameters are stored whole, outputs brought
    together.
    """
    whole = replicated(1)
    made = {
        name: whole for name, tensor in graph.tensors.items() if tensor.role is not Role.ACTIVATION
    }
    needed: dict[str, dict[Layout, None]] = {}
    for op in graph.operators:
        made.update(zip(op.outputs, decisions[op.name].outputs, strict=True))
        for name, layout in zip(op.inputs, decisions[op.name].inputs, strict=True):
            needed.setdefault(name, {})[layout] = None
    for name in graph.outputs:
        needed.setdefault(name, {})[whole] = None
    chains = {
        name: tuple(
            cheapest_chain(
                made[name],
                layout,
                tensor.shape,
                DTYPE_BYTES[tensor.dtype],
                PAIR.shape,
                _flat,
                gradient=False,
            )
            for layout in layouts
            if layout != made[name]
        )
        for name, layouts in needed.items()
        for tensor in (graph.tensors[name],)
    }
    storage = {tensor.name: whole for tensor in graph.parameters}
    return Assignment(
        mesh=PAIR,
        decisions=decisions,
        storage=storage,
        outputs=dict.fromkeys(graph.outputs, whole),
        chains=chains,
    )


def wrong_on_two_ranks(chosen: Sequence[Split]) -> dict[str, str]:
    """The node tests whose outputs on a pair of forked ranks differ from the recorded ones, with
    what is wrong.
    """
    first, second = run_ranks(_all_on_rank, 2, chosen, timeout=TIMEOUT)
    return {name: wrong for name, wrong in {**second, **first}.items() if wrong}


def _all_on_rank(chosen: Sequence[Split]) -> dict[str, str]:
    groups = DeviceGroups.create(PAIR)
    return {item.test.name: _on_rank(item, groups) for item in chosen}


def _on_rank(item: Split, groups: DeviceGroups) -> str:
    """The error on this rank, in one line; empty where all is right."""
    try:
        engine = Engine(item.program, groups, torch.device("cpu"), item.loaded.values.__getitem__)
        torch.manual_seed(0)
        call = engine.begin(item.loaded.values, keep=False, draws=Draws(exact=True))
        with torch.no_grad():
            call.run(engine.forward_order)
        outputs = [engine.output(call, place) for place in range(len(engine.outputs))]
        assert len(outputs) == len(item.test.outputs)
        for actual, wanted in zip(outputs, item.test.outputs, strict=True):
            compare(actual, np.asarray(wanted), rtol=item.test.rtol, atol=item.test.atol)
    except Exception as error:  # whatever goes wrong is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""
