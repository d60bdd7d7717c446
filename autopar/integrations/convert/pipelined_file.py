"""The Python that `pipelining` writes: a module cut at operators, its stages, and a schedule.

A value that several stages read is handed on from stage to stage:

    stage 0: ... clone(x)  |  stage 1: ... clone(x)  |  stage 2: reads x
"""

from __future__ import annotations

HEADER = """# A plan for {model} on {ranks} ranks, as torch.distributed.pipelining takes it.
# Call pipelined(module, example, loss) on every rank of torchrun, with the module on its device,
# before the optimizer is made.
#   example: the positional inputs of one micro-batch of one rank
#   loss(output, target): the mean over a micro-batch
# It gives the schedule and this rank's modules, whose parameters the optimizer takes. A step, with
# this rank's share of the batch: schedule.step(*inputs) on the first stage,
# schedule.step(target=target, losses=losses) on the last, schedule.step() between.
{notes}
import operator
import re
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import build_stage, pipeline
from torch.distributed.pipelining import {schedule} as Schedule
from torch.nn.parallel import DistributedDataParallel

STAGES, CHUNKS, REPLICAS, SHARDS = {stages}, {chunks}, {replicas}, {shards}
MICRO_BATCHES = {micro_batches}
# The operators before (or after) which stages are cut: the module's path and the operator, counted
# from the second on.
SPLITS = (
{splits}
)
UNITS = {units}
POLICY = MixedPrecisionPolicy(reduce_dtype={reduce})
RESHARD, SINGLE = {reshard}, {single}
"""
"""The part of the file that depends on the plan."""

BODY = r'''

class Pipelined(Schedule):
    """The schedule; gradients of parameters that several stages hold are added up after a step."""

    shared: list[tuple[Any, nn.Parameter]] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        losses = super().step(*args, **kwargs)
        for group, parameter in self.shared:
            gradient = parameter.grad
            dist.all_reduce(
                gradient.to_local() if hasattr(gradient, "to_local") else gradient, group=group
            )
        return losses


def pipelined(
    module: nn.Module, example: tuple[Any, ...], loss: Any
) -> tuple[Pipelined, nn.ModuleList]:
    device = next(module.parameters()).device
    mesh = init_device_mesh(
        device.type, (STAGES, REPLICAS, SHARDS), mesh_dim_names=("stages", "replicas", "shards")
    )
    pipe = pipeline(module, example, split_policy=cut)
    if pipe.num_stages != STAGES * CHUNKS:
        raise ValueError(f"the module is split into {pipe.num_stages} parts, not {STAGES * CHUNKS}")
    every = [settled(pipe.get_stage_module(number), module) for number in range(STAGES * CHUNKS)]
    held = [{id(value): name for name, value in part.named_parameters()} for part in every]
    mine = range(mesh.get_local_rank("stages"), STAGES * CHUNKS, STAGES)
    parts = [within_stage(every[number], mesh) for number in mine]
    stages = [
        build_stage(part, number, pipe.info(), device, mesh.get_group("stages"))
        for part, number in zip(parts, mine)
    ]
    schedule = Pipelined(stages[0] if SINGLE else stages, MICRO_BATCHES, loss_fn=loss)
    schedule.shared = shared(held, mesh, {number: part for number, part in zip(mine, parts)})
    return schedule, nn.ModuleList(parts)


def settled(part: nn.Module, module: nn.Module) -> nn.Module:
    """A stage with the parameters of the module itself, and only those that it reads.

    Tracing copies parameters, name by name.
    """
    read = set()
    for scope, inner in part.named_modules(remove_duplicate=False):
        nodes = inner.graph.nodes if hasattr(inner, "graph") else ()
        read |= {f"{scope}.{node.target}".lstrip(".") for node in nodes if node.op == "get_attr"}
    for name, _ in list(part.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if name in read:
            setattr(part.get_submodule(owner), leaf, attribute(module, re.sub(r"@\d+", "", name)))
        else:
            delattr(part.get_submodule(owner), leaf)
    return part


def shared(
    held: list[dict[int, str]], mesh: DeviceMesh, parts: dict[int, nn.Module]
) -> list[tuple[Any, nn.Parameter]]:
    """This rank's parameters that other stages hold too, each with the group of their ranks."""
    parameters = []
    for key in dict.fromkeys(key for names in held for key in names):
        numbers = [number for number, names in enumerate(held) if key in names]
        for ranks in (
            mesh.mesh[sorted({number % STAGES for number in numbers})].flatten(1).T.tolist()
        ):
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            for number in (
                set(numbers) & set(parts) if group is not None and dist.get_rank() in ranks else ()
            ):
                named = {
                    name.removeprefix("module."): value
                    for name, value in parts[number].named_parameters()
                }
                parameters.append((group, named[held[number][key]]))
    return parameters


def within_stage(part: nn.Module, whole: DeviceMesh) -> nn.Module:
    if SHARDS > 1:
        mesh = whole["replicas", "shards"] if REPLICAS > 1 else whole["shards"]
        for name, inner in reversed(list(part.named_modules())):
            if (
                any(fnmatchcase(name, unit) for unit in UNITS)
                and name.rpartition(".")[2].isdecimal()
            ):
                fully_shard(inner, mesh=mesh, mp_policy=POLICY, reshard_after_forward=RESHARD)
        return fully_shard(part, mesh=mesh, mp_policy=POLICY, reshard_after_forward=RESHARD)
    if REPLICAS > 1:
        replicated = DistributedDataParallel(part, process_group=whole.get_group("replicas"))
        replicated.graph = part.graph  # of which the stage reads what it receives
        return replicated
    return part


def cut(traced: fx.GraphModule) -> fx.GraphModule:
    """Mark where stages begin, and bring to each stage what it reads.

    Values of earlier stages are handed on; constants are made again.
    """
    inline(traced)
    order(traced.graph)
    marks = [mark(traced.graph, name, after) for name, after in SPLITS]
    stages: dict[fx.Node, int] = {}
    made_of_inputs: set[fx.Node] = set()
    for node in list(traced.graph.nodes):
        if node.target is operator.getitem:
            stages[node] = stages[node.args[0]]
            node.args[0].append(node)
        else:
            stages[node] = sum(mark in stages for mark in marks)
        state = node.op == "get_attr" and isinstance(attribute(traced, node.target), nn.Parameter)
        if (
            node.op == "placeholder"
            or state
            or any(given in made_of_inputs for given in node.all_input_nodes)
        ):
            made_of_inputs.add(node)
    known: dict[tuple[fx.Node, int], fx.Node] = {}

    def at(node: fx.Node, stage: int) -> fx.Node:
        if node.op == "get_attr" or stages[node] == stage:
            return node
        if (node, stage) not in known:
            begin = marks[stage - 1]
            if node in made_of_inputs:
                before = at(node, stage - 1)
                with traced.graph.inserting_before(begin):
                    copy = traced.graph.call_function(
                        torch.ops.aten.clone.default,
                        (before,),
                        {"memory_format": torch.contiguous_format},
                    )
                stack = copy.prev.meta.get("nn_module_stack") or begin.meta["nn_module_stack"]
                copy.meta = {"val": node.meta["val"].contiguous(), "nn_module_stack": stack}
            else:
                given = {source: at(source, stage) for source in node.all_input_nodes}
                place = max([begin, *(value for value in given.values() if value > begin)])
                with traced.graph.inserting_after(place):
                    copy = traced.graph.node_copy(node, lambda source: given[source])
                copy.meta["nn_module_stack"] = place.meta["nn_module_stack"]
            known[node, stage] = copy
        return known[node, stage]

    for node in list(traced.graph.nodes):
        if node in stages and node not in marks:
            stage = len(marks) if node.op == "output" else stages[node]
            for given in node.all_input_nodes:
                there = at(given, stage)
                if there is not given:
                    node.replace_input_with(given, there)
                    if changes(node, there):
                        own(traced.graph, node, given, there)
    traced.graph.lint()
    traced.recompile()
    return traced


def changes(node: fx.Node, value: fx.Node) -> bool:
    """Whether an operator writes into a value."""
    arguments = (
        node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    )
    return any(
        given is value and a.alias_info and a.alias_info.is_write
        for given, a in zip(node.args, arguments)
    )


def own(graph: fx.Graph, node: fx.Node, given: fx.Node, there: fx.Node) -> None:
    """Give a stage that writes into what it receives a copy; other readers keep the original."""
    if any(
        view.target._schema.returns[0].alias_info
        for view in (given, *given.users)
        if isinstance(view.target, torch._ops.OpOverload)
    ):
        raise ValueError(
            f"{node.target} changes in place what an earlier stage made and others share"
        )
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (there,))
    copy.meta = dict(node.meta)
    node.replace_input_with(there, copy)


def attribute(module: nn.Module, target: str) -> Any:
    for atom in target.split("."):
        module = getattr(module, atom)
    return module


def inline(traced: fx.GraphModule) -> None:
    """Regions without gradients, or without autocast, as operators of the graph itself."""
    for node in list(traced.graph.nodes):
        if str(node.target) not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        place = next(i for i, given in enumerate(node.args) if isinstance(given, fx.Node))
        body, known = attribute(traced, node.args[place].target), {}
        inputs = iter(node.args[place + 1 :])
        with traced.graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "placeholder":
                    known[inner] = next(inputs)
                elif inner.op == "output":
                    results = [known.get(given, given) for given in inner.args[0]]
                else:
                    known[inner] = traced.graph.node_copy(inner, lambda source: known[source])
            if str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
                results = [detached(traced.graph, value) for value in results]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            traced.graph.erase_node(user)
        held = node.args[place]
        traced.graph.erase_node(node)
        if not held.users:
            traced.graph.erase_node(held)
        inline(traced)
        return


def order(graph: fx.Graph) -> None:
    """All inputs read once, in their order, before anything else: so the first stage takes them."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.nodes if node.op == "call_function")
    for node in given:
        with graph.inserting_before(first):
            same = graph.call_function(torch.ops.aten.alias.default, (node,))
        node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same)
        same.meta = {"val": node.meta["val"], "nn_module_stack": first.meta["nn_module_stack"]}


def detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    result = graph.call_function(torch.ops.aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result


def mark(graph: fx.Graph, wanted: str, after: bool) -> fx.Node:
    """A mark before (or after) the operator called `wanted`.

    A name is the module's path and the operator, counted from the second on.
    """
    seen: set[str] = set()
    for node in graph.nodes:
        if (
            isinstance(node.target, torch._ops.OpOverload)
            and str(node.target) not in UNCOUNTED
            and node.meta.get("val") is not None
        ):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            path = (
                next((entry[0] for entry in reversed(stack) if entry[0]), "")
                .removeprefix("L['self'].")
                .removeprefix("L['self']")
            )
            base = "/".join(filter(None, (path, str(node.target).split(".")[1])))
            name, count = base, 1
            while name in seen:
                name, count = f"{base}.{count}", count + 1
            seen.add(name)
            if name == wanted:
                with graph.inserting_after(node) if after else graph.inserting_before(node):
                    split = graph.call_function(torch.ops.pippy._pipe_split.default)
                split.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                return split
    raise ValueError(f"the module has no operator {wanted!r}, at which the plan cuts it")


UNCOUNTED = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.msg",
    "aten._assert_scalar.default",
    "aten.sym_constrain_range.default",
    "pippy._pipe_split.default",
)
'''
"""The part of the file that is the same for all plans."""
