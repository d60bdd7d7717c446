"""Lowering: a plan's program becomes the local program of this rank, a `torch.fx` graph of local operators and collectives.

Under a schedule with micro-batches the mesh has one axis more, that of time (see `sharding.time_split`): a micro-batch is a coordinate on
it, and local sizes and shards follow as on any other axis. Nothing is communicated on it: inputs and constants come cut.
"""

from __future__ import annotations

import itertools
import operator as python_operator
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.ir import Graph, Operator, Role, Tensor
from autopar.sharding.candidates import Option
from autopar.sharding.layout import B, Kind, Layout, Placement, R, S, format_layout, replicated
from autopar.sharding.program import Compute, Decision, Program, Redistribute
from autopar.sharding.redistribution import changed_axis
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.scheduled import Mode, Part, Scheduled, scheduled

from .again import GatheredAgain, MadeAgain
from .collectives import ON_ONE_DEVICE, AxisGroup, Chain, DeviceGroups, step, step_actions
from .functions import arguments_of, is_onnx, named, on_device, only, returns_sequence
from .kept import Kept
from .local_call import LocalCall, LocalOperator
from .local_program import LocalProgram, Machinery, Time, called, identifier
from .localise import localise


def lower(program: Program, groups: DeviceGroups, *, device: torch.device | str = "cpu") -> LocalProgram:
    """The local program of this rank; nodes carry the names of operators and tensors."""
    return lower_scheduled(scheduled(program), groups, device=device)


def lower_scheduled(
    plan: Scheduled,
    groups: DeviceGroups,
    *,
    device: torch.device | str = "cpu",
    time: Time | None = None,
    machinery: Machinery | None = None,
) -> LocalProgram:
    """As `lower`, under a schedule; with `time`, of one micro-batch (`plan` is that of the whole batch)."""
    return _Lowering(plan, groups, torch.device(device), time, machinery or Machinery()).run()


def local_operators(plan: Scheduled, groups: DeviceGroups, time: Time) -> list[LocalOperator]:
    """The local operators of a micro-batch in order, by which one is told from another."""
    lowering = _Lowering(plan, groups, torch.device("cpu"), time, Machinery())
    return [lowering.local(item) for item in plan.program.steps if isinstance(item, Compute) and lowering.runs(item)]


def lower_preamble(
    plan: Scheduled, groups: DeviceGroups, names: Sequence[str], *, device: torch.device | str = "cpu"
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """What gives the whole values `names` of the preamble from constants and inputs, and the names of those."""
    lowering = _Lowering(plan, groups, torch.device(device), None, Machinery())
    return lowering.preamble(names)


def local_shard(value: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, through which gradients flow; a shard as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


Place = tuple[str, Layout]


class _Lowering:
    """The growing graph, and where every (tensor, layout) is found in it.

    Inside a part that is made again `graph` is that part's own, and `inside` what is found there.
    """

    def __init__(self, plan: Scheduled, groups: DeviceGroups, device: torch.device, time: Time | None, machinery: Machinery) -> None:
        program = plan.program
        if groups.mesh.shape != program.assignment.mesh.shape:
            raise PlanError(f"the plan is for the mesh {program.assignment.mesh}, the ranks form {groups.mesh}")
        self.plan, self.program, self.time, self.machinery = plan, program, time, machinery
        self.model: Graph = program.graph
        self.axes = groups.mesh.axes
        self.mesh = groups.mesh.shape
        self.coordinate, self.groups = groups.coordinate, groups.axes
        if time is not None:
            self.mesh = (time.count, *self.mesh)
            self.coordinate = (time.index, *self.coordinate)
            self.groups = (AxisGroup("", time.count, time.index), *self.groups)
        self.device = device
        self.main = self.graph = fx.Graph()
        self.values: dict[Place, fx.Node] = {}
        self.inside: dict[Place, fx.Node] | None = None
        self.sources: dict[tuple[str, Placement], fx.Node] = {}
        self.hosted: dict[Place, fx.Node] = {}  # sources and their parts where they come from, which may be another device
        self.given: Counter[str] = Counter()  # names of placeholders
        self.unopened: set[fx.Node] = set()  # parameters that nothing has read so far
        self.whole_sources = set(self.model.inputs)
        if time is not None:
            decided = program.assignment.decisions
            self.whole_sources |= {n for op in self.model.operators if decided[op.name].rule is None for n in op.outputs}
            self.whole_sources |= {t.name for t in self.model.tensors.values() if t.role is Role.CONSTANT}

    def run(self) -> LocalProgram:
        """Lower every part in its order."""
        model, storage = self.model, self.program.assignment.storage
        parameters = tuple(tensor.name for tensor in model.parameters)
        constants = tuple(tensor.name for tensor in model.tensors.values() if tensor.role is Role.CONSTANT)
        whole = replicated(len(self.axes))
        for name in (*parameters, *(constants if self.time is None else ())):
            self.values[self.place(name, storage.get(name, whole))] = self._placeholder(self.graph, name)
        for name in model.inputs if self.time is None else ():
            self.hosted[name, whole] = self._placeholder(self.graph, name)
        self.unopened = {self.values[self.place(name, storage[name])] for name in parameters}
        for number, part in enumerate(self.plan.parts):
            if part.again and self.plan.trains:
                self._made_again(number, part)
            else:
                self._steps(part.steps)
        outputs = self._outputs()
        updated = tuple(n for n, fresh in model.updates.items() if self.time is None or fresh not in self.whole_sources)
        fresh = [self._value(self.place(model.updates[name], whole)) for name in updated]
        self.graph.output((*(self._value(self.place(*pair)) for pair in outputs), *fresh))
        self.graph.lint()
        names = [name for name, _ in outputs]
        return LocalProgram(
            module=fx.GraphModule(torch.nn.Module(), self.graph, class_name="LocalProgram"),
            parameters=parameters,
            constants=constants,
            inputs=model.inputs,
            outputs=tuple((name, self._joined(name, layout)) for name, layout in outputs),
            updates=tuple(model.updates),
            loss=names.index(model.loss) if model.loss in names else None,
            sources=tuple(self.sources),
            updated=updated,
        )

    def preamble(self, names: Sequence[str]) -> tuple[fx.GraphModule, tuple[str, ...]]:
        """Lower the operators behind `names`, which are whole."""
        needed, behind = set(names), []
        for operator in reversed(self.model.operators):
            if not needed.isdisjoint(operator.outputs):
                behind.append(operator)
                needed.update(operator.inputs)
        whole = replicated(len(self.axes))
        given = tuple(name for name, t in self.model.tensors.items() if name in needed and t.role in (Role.INPUT, Role.CONSTANT))
        for name in given:
            known = self.hosted if name in self.whole_sources else self.values
            known[name, whole] = self._placeholder(self.graph, name)
        for operator in reversed(behind):
            self._compute(Compute(operator=operator, decision=self.program.assignment.decisions[operator.name]))
        self.graph.output(tuple(self._value((name, whole)) for name in names))
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name="Preamble"), given

    # --- the axis of time ---

    def _joined(self, name: str, layout: Layout) -> Layout:
        """How an output lies when those of all micro-batches are joined: a split of their samples is one within each of them."""
        if self.time is None or (time := self.placement(name)).kind is not Kind.SPLIT:
            return layout
        within = S(time.dim, time.parts * self.time.count)
        return tuple(within if placement == time else placement for placement in layout)

    def runs(self, item: Compute) -> bool:
        """Whether an operator is part of this program: of a micro-batch's, all but those of the preamble that run once."""
        return self.time is None or item.decision.rule is not None or item.operator.name in self.time.split.options

    def placement(self, name: str) -> Placement:
        """How a tensor lies on the axis of time; parameters are whole there, their gradients shares."""
        assert self.time is not None
        if self.model.tensors[name].role is Role.PARAMETER:
            return B if name in self.program.assignment.gradients else R
        return self.time.split.placements[name]

    def layout(self, layout: Layout, placement: Placement) -> Layout:
        """A layout with its placement on the axis of time, where there is one."""
        return layout if self.time is None else (placement, *layout)

    def place(self, name: str, layout: Layout) -> Place:
        """Where a tensor's value is found."""
        return name, layout if self.time is None else (self.placement(name), *layout)

    def decision(self, item: Compute) -> Decision:
        """What is decided for an operator, on all axes."""
        decision = item.decision
        if self.time is None or item.operator.name not in self.time.split.options:
            return decision
        option, rule = self.time.split.options[item.operator.name], decision.rule
        options = decision.options
        if rule is None:
            rule = rule_of(Call.of(self.model, item.operator))
            inputs, outputs = (R,) * len(item.operator.inputs), (R,) * len(item.operator.outputs)
            options = (Option(name="R", factor=-1, parts=1, inputs=inputs, outputs=outputs),) * len(self.axes)
        return Decision(
            options=(option, *options),
            rule=rule,
            inputs=tuple(self.layout(found, p) for found, p in zip(decision.inputs, option.inputs, strict=True)),
            outputs=tuple(self.layout(found, p) for found, p in zip(decision.outputs, option.outputs, strict=True)),
        )

    def _placeholder(self, graph: fx.Graph, name: str) -> fx.Node:
        """An argument of the program, under a name that no other has."""
        found = identifier(name)
        self.given[found] += 1
        return graph.placeholder(found if self.given[found] == 1 else f"{found}_as_{self.given[found]}")

    def _source(self, place: Place) -> fx.Node:
        """A value that comes whole (cut for the micro-batch), in the layout in which it is read."""
        if place in self.hosted:
            return self.hosted[place]
        name, times = place[0], len(place[1]) - len(self.axes)
        lead, layout = place[1][:times], place[1][times:]
        if all(p == R for p in layout):
            last = next(reversed([node for node in self.main.nodes if node.op == "placeholder"]), None)
            with self.main.inserting_after(last) if last is not None else self.main.inserting_before():
                value = self.sources[name, lead[0]] = self._placeholder(self.main, name)
        else:
            chain = next((c for c in self.program.assignment.chains.get(name, ()) if c[-1] == layout), None)
            if chain is None:
                raise PlanError(f"the plan has no redistribution of {name!r} to [{format_layout(layout)}]")
            actions = self._chain(name, tuple((*lead, *c) for c in chain), 0)
            start = name, (*lead, *chain[0])
            moved = self._is_input(name) and all(ahead.name in ON_ONE_DEVICE for ahead, _, _ in actions)
            value = self._source(start) if moved else self._main_value(start)
            for ahead, _, group in actions:
                value = self.main.create_node("call_function", step, (value, ahead, None, group), name=f"{identifier(name)}_part")
        self.hosted[place] = value
        return value

    def _is_input(self, name: str) -> bool:
        return self.model.tensors[name].role is Role.INPUT

    def _arrived(self, place: Place) -> fx.Node:
        """A source on the device of this rank; of an input no more than what is read gets there."""
        value = self._source(place)
        if not self._is_input(place[0]) or self.device.type == "cpu":
            return value
        return self.main.create_node("call_method", "to", (value, self.device), name=f"{identifier(place[0])}_here")

    # --- values ---

    def _main_value(self, place: Place) -> fx.Node:
        """A value outside of the parts that are made again."""
        if place not in self.values and place[0] in self.whole_sources:
            self.values[place] = self._arrived(place)
        if place not in self.values:
            raise PlanError(f"the plan reads {place[0]!r} as [{format_layout(place[1])}] before it is made")
        node = self.values[place]
        if node in self.unopened:
            # Here and not before the program: autograd runs what came first last, and would hold back every gradient of a parameter.
            self.unopened.remove(node)
            node = self.values[place] = self.main.call_function(local_shard, (node,))
        return node

    def _value(self, place: Place) -> fx.Node:
        return self._main_value(place) if self.inside is None else self.inside[place]

    def _made(self, place: Place, node: fx.Node) -> None:
        (self.values if self.inside is None else self.inside)[place] = node

    def _outputs(self) -> tuple[tuple[str, Layout], ...]:
        planned = self.program.assignment.outputs
        names = dict.fromkeys((*self.model.outputs, *((self.model.loss,) if self.model.loss else ())))
        missing = [name for name in names if name not in planned]
        if missing:
            raise PlanError(f"the plan gives no layout for the outputs {', '.join(missing)}")
        return tuple((name, planned[name]) for name in (*self.model.outputs, *(n for n in names if n not in self.model.outputs)))

    # --- steps ---

    def _steps(self, indices: Iterable[int]) -> None:
        for index in indices:
            item = self.program.steps[index]
            if isinstance(item, Redistribute):
                if item.tensor not in self.whole_sources:
                    self._redistribute(index, item)
            elif self.runs(item):
                self._compute(item)

    def _reads(self, index: int) -> list[Place]:
        item = self.program.steps[index]
        if isinstance(item, Compute):
            return list(zip(item.operator.inputs, self.decision(item).inputs, strict=True)) if self.runs(item) else []
        return [] if item.tensor in self.whole_sources else [self._start(item)]

    def _start(self, item: Redistribute) -> Place:
        return self.place(item.tensor, item.chain[0])

    def _made_again(self, number: int, part: Part) -> None:
        """A part as a graph of its own, which runs once more in the backward pass."""
        others = [i for other in self.plan.parts if other is not part for i in other.steps]
        wanted = {place for i in others for place in self._reads(i)} | {self.place(*pair) for pair in self._outputs()}
        wanted |= {self.place(name, replicated(len(self.axes))) for name in self.model.updates.values()}
        made: set[Place] = set()
        outer: dict[Place, fx.Node] = {}
        for index in part.steps:
            item = self.program.steps[index]
            outer.update((place, self._main_value(place)) for place in self._reads(index) if place not in made)
            if isinstance(item, Compute) and self.runs(item):
                made.update(zip(item.operator.outputs, self.decision(item).outputs, strict=True))
            elif isinstance(item, Redistribute) and item.tensor not in self.whole_sources:
                made.add(self.place(item.tensor, item.chain[-1]))
        self.graph = fx.Graph()
        self.inside = {place: self._placeholder(self.graph, place[0]) for place in outer}
        self._steps(part.steps)
        results = [place for place in self.inside if place in made and place in wanted]
        self.graph.output(tuple(self.inside[place] for place in results))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph, class_name="Part")
        self.graph, self.inside = self.main, None
        differentiable = tuple(place[0] in self.program.assignment.gradients for place in results)
        part_again = called("made_again", MadeAgain(module.forward, differentiable, self.device))
        node = self.main.create_node("call_function", part_again, tuple(outer.values()), name=f"part_{number}")
        for i, place in enumerate(results):
            self.values[place] = self.main.create_node("call_function", python_operator.getitem, (node, i), name=identifier(place[0]))

    def _chain(self, name: str, chain: Sequence[Layout], bucketed: int) -> Chain:
        """The actions of a redistribution; bucketed steps are left to the gradient buckets."""
        found = []
        for index, (before, after) in enumerate(itertools.pairwise(chain)):
            if index >= bucketed:
                axis = changed_axis(before, after)
                ahead, back = step_actions(before, after, axis, self.mesh)
                found.append((ahead, back, self.groups[axis]))
        return tuple(found)

    def _redistribute(self, index: int, item: Redistribute) -> None:
        """One node a step; parameters under a schedule that keeps or regathers them have one node for all."""
        place = self._start(item)
        value = self._value(place)
        placement = place[1][0] if self.time is not None else R
        chain = [self.layout(layout, placement) for layout in item.chain]
        actions = self._chain(item.tensor, chain, item.bucketed)
        mode = self.plan.modes.get(index)
        name = identifier(item.tensor)
        if mode is not None and actions and self.inside is None and (mode is Mode.AGAIN or self.time is not None):
            if mode is Mode.AGAIN:
                asked_for = any(index in found for found in self.plan.regathered.values())
                function = called("gathered_again", GatheredAgain(actions, differentiable=item.differentiable, asked_for=asked_for))
            else:
                fresh = Kept(actions, self.machinery.progress, once=mode is Mode.ONCE, differentiable=item.differentiable)
                function = called("kept", self.machinery.kept.setdefault(index, fresh))
            value = self.graph.create_node("call_function", function, (value,), name=f"{name}_{mode}")
        else:
            for ahead, back, group in actions:
                axis = self.axes[self.groups.index(group) - (self.time is not None)].name
                what = "share" if ahead.name == "nothing" else ahead.name
                arguments = (value, ahead, back if item.differentiable else None, group)
                value = self.graph.create_node("call_function", step, arguments, name=f"{name}_{what}_{axis}")
        self._made((item.tensor, chain[-1]), value)

    def local(self, item: Compute) -> LocalOperator:
        """The local form of an operator."""
        tensors, operator = self.model.tensors, item.operator
        decision = self.decision(item)
        call = LocalCall(
            operator=operator,
            decision=decision,
            inputs=tuple(tensors[name] for name in operator.inputs),
            outputs=tuple(tensors[name] for name in operator.outputs),
            mesh=self.mesh,
            coordinate=self.coordinate,
            groups=self.groups,
        )
        return localise(call)

    def _compute(self, item: Compute) -> None:
        """One call with local sizes; a mean over a split factor is scaled."""
        operator, decision = item.operator, self.decision(item)
        local = self.local(item)
        inputs = [self._value(place) for place in zip(operator.inputs, decision.inputs, strict=True)]
        arguments = arguments_of(local.function, local.attributes, inputs, self.device)
        function = on_device(local.function, self.device) if is_onnx(operator.kind) and not inputs else named(local.function)
        result = self.graph.create_node("call_function", function, (), arguments, name=identifier(operator.name))
        results = self._unpack(result, operator, returns_sequence(local.function, operator))
        if local.scale != 1.0:
            results = [self.graph.call_function(torch.mul, (value, local.scale)) for value in results]
        for output, layout, value in zip(operator.outputs, decision.outputs, results, strict=True):
            value.meta["tensor"] = _describe(self.model.tensors[output], layout)
            self._made((output, layout), value)

    def _unpack(self, result: fx.Node, operator: Operator, sequence: bool) -> list[fx.Node]:
        if sequence:
            return [
                self.graph.create_node("call_function", python_operator.getitem, (result, i), name=identifier(output))
                for i, output in enumerate(operator.outputs)
            ]
        if is_onnx(operator.kind):
            return [self.graph.call_function(only, (result,))]
        return [result]


def _describe(tensor: Tensor, layout: Layout) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} [{format_layout(layout)}]"
