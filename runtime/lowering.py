"""Lowering: a plan's program becomes the local program of this rank, a `torch.fx` graph of local operators and collectives."""

from __future__ import annotations

import itertools
import operator as python_operator
import re
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.ir import Graph, Operator, Role, Tensor
from autopar.sharding.layout import Layout, format_layout, replicated
from autopar.sharding.program import Compute, Program, Redistribute
from autopar.sharding.redistribution import changed_axis

from .collectives import DeviceGroups, step, step_actions
from .functions import arguments_of, is_onnx, named, on_device, only, returns_sequence
from .localise import LocalCall, localise


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """What one rank runs: `module(*parameters, *constants, *inputs)` gives the local outputs as a tuple.

    Parameters come as local shards of their storage layouts (or as DTensors), constants and inputs whole; `outputs` pairs every output
    with its layout: the graph's outputs in order, then the loss where it is none of them. Behind the outputs come the whole new
    values of the constants `updates`.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Layout], ...]
    updates: tuple[str, ...]
    loss: int | None


def lower(program: Program, groups: DeviceGroups, *, device: torch.device | str = "cpu") -> LocalProgram:
    """The local program of this rank; nodes carry the names of operators and tensors."""
    return _Lowering(program, groups, torch.device(device)).run()


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, through which gradients flow; a shard as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _identifier(name: str) -> str:
    """A readable Python identifier out of a tensor's or operator's name."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text and not text[0].isdigit() else f"v_{text}"


class _Lowering:
    """The growing graph, and where every (tensor, layout) is found in it."""

    def __init__(self, program: Program, groups: DeviceGroups, device: torch.device) -> None:
        if groups.mesh.shape != program.assignment.mesh.shape:
            raise PlanError(f"the plan is for the mesh {program.assignment.mesh}, the ranks form {groups.mesh}")
        self.program = program
        self.model: Graph = program.graph
        self.groups = groups
        self.mesh = groups.mesh.shape
        self.device = device
        self.graph = fx.Graph()
        self.values: dict[tuple[str, Layout], fx.Node] = {}
        self.unopened: set[fx.Node] = set()  # parameters that nothing has read so far

    def run(self) -> LocalProgram:
        """Lower every step in the program's order."""
        model, storage = self.model, self.program.assignment.storage
        parameters = tuple(tensor.name for tensor in model.parameters)
        constants = tuple(tensor.name for tensor in model.tensors.values() if tensor.role is Role.CONSTANT)
        whole = replicated(len(self.mesh))
        for name in (*parameters, *constants, *model.inputs):
            self.values[name, storage.get(name, whole)] = self.graph.placeholder(_identifier(name))
        self.unopened = {self.values[name, storage[name]] for name in parameters}
        for item in self.program.steps:
            if isinstance(item, Redistribute):
                self._redistribute(item)
            else:
                self._compute(item)
        outputs = self._outputs()
        fresh = [self._value(name, whole) for name in self.model.updates.values()]
        self.graph.output((*(self._value(*pair) for pair in outputs), *fresh))
        self.graph.lint()
        names = [name for name, _ in outputs]
        return LocalProgram(
            module=fx.GraphModule(torch.nn.Module(), self.graph, class_name="LocalProgram"),
            parameters=parameters,
            constants=constants,
            inputs=model.inputs,
            outputs=outputs,
            updates=tuple(self.model.updates),
            loss=names.index(model.loss) if model.loss in names else None,
        )

    def _outputs(self) -> tuple[tuple[str, Layout], ...]:
        planned = self.program.assignment.outputs
        names = dict.fromkeys((*self.model.outputs, *((self.model.loss,) if self.model.loss else ())))
        missing = [name for name in names if name not in planned]
        if missing:
            raise PlanError(f"the plan gives no layout for the outputs {', '.join(missing)}")
        return tuple((name, planned[name]) for name in (*self.model.outputs, *(n for n in names if n not in self.model.outputs)))

    def _value(self, name: str, layout: Layout) -> fx.Node:
        if (name, layout) not in self.values:
            raise PlanError(f"the plan reads {name!r} as [{format_layout(layout)}] before it is made")
        node = self.values[name, layout]
        if node in self.unopened:
            # Here and not before the program: autograd runs what came first last, and would hold back every gradient of a parameter.
            self.unopened.remove(node)
            node = self.values[name, layout] = self.graph.call_function(local_shard, (node,))
        return node

    def _redistribute(self, item: Redistribute) -> None:
        """One node a step; bucketed steps are left to the gradient buckets."""
        value = self._value(item.tensor, item.chain[0])
        for index, (before, after) in enumerate(itertools.pairwise(item.chain)):
            if index < item.bucketed:
                continue
            axis = changed_axis(before, after)
            group = self.groups.axes[axis]
            ahead, back = step_actions(before, after, axis, self.mesh)
            what = "share" if ahead.name == "nothing" else ahead.name
            name = f"{_identifier(item.tensor)}_{what}_{self.groups.mesh.axes[axis].name}"
            arguments = (value, ahead, back if item.differentiable else None, group)
            value = self.graph.create_node("call_function", step, arguments, name=name)
        self.values[item.tensor, item.chain[-1]] = value

    def _compute(self, item: Compute) -> None:
        """One call with local sizes; a mean over a split factor is scaled."""
        operator, decision = item.operator, item.decision
        tensors = self.model.tensors
        call = LocalCall(
            operator=operator,
            decision=decision,
            inputs=tuple(tensors[name] for name in operator.inputs),
            outputs=tuple(tensors[name] for name in operator.outputs),
            mesh=self.mesh,
            coordinate=self.groups.coordinate,
            groups=self.groups.axes,
        )
        local = localise(call)
        inputs = [self._value(name, layout) for name, layout in zip(operator.inputs, decision.inputs, strict=True)]
        arguments = arguments_of(local.function, local.attributes, inputs, self.device)
        function = on_device(local.function, self.device) if is_onnx(operator.kind) and not inputs else named(local.function)
        result = self.graph.create_node("call_function", function, (), arguments, name=_identifier(operator.name))
        results = self._unpack(result, operator, returns_sequence(local.function, operator))
        if local.scale != 1.0:
            results = [self.graph.call_function(torch.mul, (value, local.scale)) for value in results]
        for output, layout, value in zip(operator.outputs, decision.outputs, results, strict=True):
            value.meta["tensor"] = _describe(tensors[output], layout)
            self.values[output, layout] = value

    def _unpack(self, result: fx.Node, operator: Operator, sequence: bool) -> list[fx.Node]:
        if sequence:
            return [
                self.graph.create_node("call_function", python_operator.getitem, (result, i), name=_identifier(output))
                for i, output in enumerate(operator.outputs)
            ]
        if is_onnx(operator.kind):
            return [self.graph.call_function(only, (result,))]
        return [result]


def _describe(tensor: Tensor, layout: Layout) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} [{format_layout(layout)}]"
