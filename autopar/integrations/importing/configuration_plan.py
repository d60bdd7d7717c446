"""The plan of a configuration, beside the plan of a search that is free of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.api import Planned, plan_loaded
from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import Framework, framework_of
from autopar.errors import NoPlanFits, UsageError
from autopar.integrations.importing.pipeline_layout import even
from autopar.ir import Graph
from autopar.model import LoadedModel
from autopar.options.plan_options import choose_cluster
from autopar.planning.model.progress import Progress
from autopar.planning.model.recompute import modules_of
from autopar.planning.model.request import WITHOUT_LIMIT
from autopar.schemes import scheme_named
from autopar.schemes.pinning import stage_mesh
from autopar.sharding.layer_numbers import around_layers, between_layers
from autopar.sharding.rules import is_product

from .configuration import Configuration
from .huggingface import Styles
from .megatron import SIZES
from .megatron_framework import MERGED, dispatcher_of, layout_of, megatron_framework


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices to plan for: their number, their cluster, and the bytes of one that are used.

    `target`: who runs the plans. None: the configuration's number of devices, this machine or the
    default cluster, the configuration's project, all memory.
    """

    devices: int | None = None
    cluster: str | Path | Cluster | None = None
    target: str | None = None
    memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration with its plan, and whether that plan `fits` the memory.

    `free`: the plan of a search without the configuration, by the same framework; None if it was
    not searched, or fits no device.
    """

    configuration: Configuration
    planned: Planned
    fits: bool
    scheme: str
    free: Planned | None


EVERYTHING = Hardware()


def framework_of_run(configuration: Configuration) -> Framework:
    """The framework that runs a configuration, as far as it says how."""
    if configuration.arguments:
        return megatron_framework(configuration)
    return framework_of(configuration.source, configuration.zero)


def scheme_text(configuration: Configuration, data: int, node: int = 0) -> str:
    """The configuration as a product of schemes, from the outside in; empty for one device.

    `node`: devices of a node, by which experts are split in two where rows travel by nodes.

    >>> tensor = Configuration(source="", zero=3, tensor=2, sequence_parallel=True)
    >>> scheme_text(tensor, 8)
    'data 8 (zero3) x megatron-sp 2'
    >>> folded = Configuration(source="", tensor=2, expert=8, expert_tensor=1)
    >>> scheme_text(folded, 8)
    'data 2 x expert 4 x expert+megatron 2'
    """
    words = []
    for name, size, stored in _factors(configuration, data, node):
        words.append(f"{name} {size} ({stored})" if stored else f"{name} {size}")
    return " x ".join(words)


def _factors(configuration: Configuration, data: int, node: int = 0) -> list[tuple[str, int, str]]:
    """The schemes of a configuration with their degrees and how they store parameters."""
    factors = []
    if configuration.stages > 1:
        factors.append((f"pipeline-{configuration.schedule or '1f1b'}", configuration.stages, ""))
    expert = configuration.experts_on(data)
    replicas = data // expert
    shards = replicas
    if configuration.shards is not None:
        shards = min(configuration.shards // expert or 1, replicas)
    stored = f"zero{configuration.zero}" if configuration.zero else ""
    if stored and 1 < shards < replicas:
        factors += [("data", replicas // shards, ""), ("data", shards, stored)]
    elif replicas > 1:
        factors.append(("data", replicas, stored if shards > 1 else ""))
    # What is no expert is shared out over the ranks of experts, too.
    nodes = expert * configuration.inner // node if node else 1
    if nodes < 2 or expert % nodes or not _by_node(configuration):
        nodes = 1
    factors += [("expert", size, stored) for size in (nodes, expert // nodes) if size > 1]
    if configuration.context > 1:
        factors.append((configuration.context_scheme, configuration.context, ""))
    if configuration.tensor > 1 and not configuration.styles:
        tensor = "megatron-sp" if configuration.sequence_parallel else "megatron"
        if configuration.folded:
            tensor = f"expert+{tensor}"
        factors.append((tensor, configuration.tensor, ""))
    return factors


def _by_node(configuration: Configuration) -> bool:
    """Whether rows travel to experts once to every node, and on inside it."""
    return dispatcher_of(configuration.arguments) == "node"


def import_configuration(
    configuration: Configuration,
    model: LoadedModel,
    hardware: Hardware = EVERYTHING,
    *,
    sizes: Mapping[str, int] | None = None,
    compare: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Plan the model as the configuration says, as its framework runs it.

    `sizes`: the model's, where they are known, which must be the configuration's. A plan that
    exceeds the memory is searched without a limit, to show the excess.
    """
    require_sizes(configuration, model.graph, sizes or {})
    devices = hardware.devices
    if not configuration.styles or configuration.tensor > 1:
        devices = configuration.devices(devices)
    cluster, _ = choose_cluster(hardware.cluster, devices)
    work = framework_of_run(configuration)
    target = hardware.target or configuration.source
    cluster = cluster.run_by(framework_of(target) if hardware.target else work)
    free: dict[str, Any] = {
        "cluster": cluster,
        "optimizer": configuration.optimizer or "adamw",
        "master": configuration.master,
        "reduce": configuration.reduce,
        "progress": progress,
        "memory": hardware.memory,
    }
    pins, scheme = _pins(configuration, model, cluster)
    planned = _planned(model, free | pins)
    fits = planned is not None
    if planned is None:
        planned = plan_loaded(model, **{**free, **pins, "memory": WITHOUT_LIMIT})
    written = planned.plan.model_copy(update={"target": target})
    return Imported(
        configuration=configuration,
        planned=replace(planned, plan=written),
        fits=fits,
        scheme=scheme,
        free=_planned(model, free | {"target": target}) if compare else None,
    )


def require_sizes(configuration: Configuration, graph: Graph, sizes: Mapping[str, int]) -> None:
    """Refuse a model whose sizes are others than those that the configuration names.

    `sizes`: the model's, as far as they are known; else its layers count by their names.
    """
    layers = len(_between_layers(graph)) + 1
    known = ({"layers": layers} if layers > 1 else {}) | dict(sizes)
    for argument, size in configuration.sizes.items():
        of_model = known.get(SIZES[argument])
        if of_model is not None and of_model != size:
            raise UsageError(
                f"{configuration.source}: --{argument} is {size}, and the model has {of_model}: "
                "give the model that the configuration is for"
            )


def _between_layers(graph: Graph) -> tuple[range, ...]:
    return between_layers(_named(graph))


def _named(graph: Graph) -> list[tuple[str, bool]]:
    """The names of operators, and whether they are products."""
    return [(op.name, is_product(op.kind)) for op in graph.operators]


def _cuts(configuration: Configuration, graph: Graph) -> tuple[range, ...] | None:
    """The operators before which a stage may begin: between layers, as many as each chunk has.

    None where names number no layers.
    """
    places = _between_layers(graph)
    layers = len(places) + 1
    counts = configuration.dealt
    if configuration.arguments and places:
        chunks = configuration.stages * configuration.interleave
        letters = layout_of(configuration, layers) or even(layers, chunks)
        counts = tuple(chunk.count("t") for chunk in letters)
    if not counts or not places:
        return places or None
    if sum(counts) != layers:
        return places
    return cuts_between(graph, counts)


def cuts_between(graph: Graph, counts: Sequence[int]) -> tuple[range, ...]:
    """The operators before one of which each chunk but the first begins, of so many layers each.

    A chunk may hold the embedding or the loss alone.
    """
    first, last = around_layers(_named(graph))
    begins = (first, *_between_layers(graph), last)
    return tuple(begins[end] for end in itertools.accumulate(counts[:-1]))


def _planned(model: LoadedModel, arguments: Mapping[str, Any]) -> Planned | None:
    """The best plan, or None where none fits the memory."""
    try:
        return plan_loaded(model, **arguments)
    except NoPlanFits:
        return None


def _pins(
    configuration: Configuration, model: LoadedModel, cluster: Cluster
) -> tuple[dict[str, Any], str]:
    """The configuration as arguments of `plan_loaded`, and the name of what they pin."""
    data = configuration.degree_of_data(cluster.devices)
    if configuration.styles:
        pins, scheme = _by_styles(configuration, cluster)
    else:
        pins, scheme = _by_scheme(configuration, data, cluster.levels[0].size)
    shapes = (model.graph.tensors[name].shape for name in model.graph.inputs)
    batch = next((shape[0] for shape in shapes if shape), None)
    pins["micro_batches"] = configuration.count(data, batch)
    pins["recompute"] = _recompute(configuration, model.graph)
    # Nothing is planned into host memory, and no passes are merged, without being asked for.
    pins["offload"] = configuration.offload or "none"
    merges = MERGED in configuration.arguments and pins["micro_batches"] not in (None, 1)
    pins["overlap_experts"] = "on" if merges else "off"
    if configuration.interleave > 1:
        pins["interleave"] = configuration.interleave
    if configuration.stages > 1:
        pins["cuts"] = _cuts(configuration, model.graph)
    return pins, scheme


def _recompute(configuration: Configuration, graph: Graph) -> str | None:
    """The mode of recompute, or the modules named beside a selective one that the model has."""
    named = configuration.recompute_modules
    if configuration.recompute != "selective" or not named:
        return configuration.recompute
    return ",".join(modules_of(graph, named)) or "none"


def _by_scheme(configuration: Configuration, data: int, node: int) -> tuple[dict[str, Any], str]:
    """The pins of degrees.

    The sequence is split around a ring, or in heads where the model lets it.
    """
    text = scheme_text(configuration, data, node)
    if configuration.zero is not None and configuration.zero > 3:
        raise UsageError(f"{configuration.source}: ZeRO {configuration.zero} is none of 0 to 3")
    pins: dict[str, Any] = {"stages": configuration.stages}
    if not text:
        return pins, "one device"
    scheme_named(text)
    pins["scheme"] = text
    # With replicas and shards, the scheme says which axis stores parameters split.
    if sum(name == "data" for name, _, _ in _factors(configuration, data)) < 2:
        pins["zero"] = configuration.zero or 0
    return pins, text


def _by_styles(configuration: Configuration, cluster: Cluster) -> tuple[dict[str, Any], str]:
    """The pins of styles on the axis of ranks that split weights, else on all devices."""
    tensor = configuration.tensor if configuration.tensor > 1 else cluster.devices
    copies = cluster.devices // tensor
    mesh = stage_mesh(cluster, [copies, tensor] if copies > 1 else [tensor])
    axis = mesh.axes[-1].name
    pins = {"mesh": mesh, "stages": 1, "pins": Styles(configuration.styles, axis)}
    if configuration.zero is not None:
        pins["zero"] = configuration.zero
    return pins, f"{len(configuration.styles)} styles over {axis}"
