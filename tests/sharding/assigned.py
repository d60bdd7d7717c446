"""Programs with strategies chosen by hand, for modules small enough to follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopar.frontends.torch import import_torch
from autopar.ir import Graph, with_loss
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import Layout, parse_layout, replicated
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Decision, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import cheapest_chain


def graph_of(module: nn.Module, *shape: int) -> Graph:
    """The module's graph on one float input, with a loss."""
    return with_loss(import_torch(module, (torch.empty(shape),)).graph)


def flat(kind: str, axis: int, nbytes: int) -> float:
    """A latency and a rate, the same for all collectives."""
    return 1e-6 + nbytes * 1e-9


def decide(analysis: Analysis, strategies: Mapping[str, str], axes: int) -> dict[str, Decision]:
    """Decisions from option names (one an axis), R for operators that are not named."""
    results = {}
    for op in analysis.graph.operators:
        if op.name in analysis.cold:
            results[op.name] = Decision.cold(op, axes)
            continue
        offer = analysis.offers[op.name]
        known = {option.name: option for option in offer.options}
        options = tuple(
            known[name] for name in strategies.get(op.name, " ".join("R" * axes)).split()
        )
        inputs = tuple(tuple(o.inputs[i] for o in options) for i in range(len(op.inputs)))
        outputs = tuple(tuple(o.outputs[i] for o in options) for i in range(len(op.outputs)))
        results[op.name] = Decision(
            options=options, rule=offer.rule, inputs=inputs, outputs=outputs
        )
    return results


def assign(
    graph: Graph,
    mesh: Mesh,
    strategies: Mapping[str, str],
    *,
    storage: Mapping[str, str] | None = None,
    train: bool = True,
) -> Assignment:
    """An assignment with one chain for every layout that some operator needs; outputs are whole."""
    analysis = analyse(graph, train=train)
    whole = replicated(len(mesh.axes))
    decisions = decide(analysis, strategies, len(mesh.axes))
    stored = {
        t.name: parse_layout((storage or {}).get(t.name, " ".join("R" for _ in mesh.axes)))
        for t in graph.parameters
    }
    home: dict[str, Layout] = {t.name: stored.get(t.name, whole) for t in graph.tensors.values()}
    needed: dict[str, dict[Layout, None]] = {}
    for op in graph.operators:
        for name, layout in zip(op.inputs, decisions[op.name].inputs, strict=True):
            needed.setdefault(name, {})[layout] = None
        home.update(zip(op.outputs, decisions[op.name].outputs, strict=True))
    for name in analysis.outputs:
        needed.setdefault(name, {})[whole] = None
    chains = {}
    for name, layouts in needed.items():
        tensor = graph.tensors[name]
        chains[name] = tuple(
            cheapest_chain(
                home[name],
                to,
                tensor.shape,
                tensor.bytes // tensor.size,
                mesh.shape,
                flat,
                gradient=name in analysis.gradients,
            )
            for to in layouts
            if to != home[name]
        )
    outputs = dict.fromkeys(analysis.outputs, whole)
    return Assignment(
        mesh=mesh,
        decisions=decisions,
        storage=stored,
        outputs=outputs,
        chains=chains,
        gradients=analysis.gradients,
    )


def program(
    graph: Graph,
    mesh: Mesh,
    strategies: Mapping[str, str],
    *,
    storage: Mapping[str, str] | None = None,
    train: bool = True,
) -> Program:
    """The program of `assign`."""
    return build_program(graph, assign(graph, mesh, strategies, storage=storage, train=train))
