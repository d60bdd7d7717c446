"""From a scheduled program to the segments of this rank."""

from __future__ import annotations

import itertools
import operator as python_operator
from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir import Operator, Role, Tensor
from autopar.order.scheduled import Scheduled, scheduled
from autopar.sharding.layout import Layout, R, format_layout, replicated
from autopar.sharding.program import Compute, Program, Redistribute, departure
from autopar.sharding.redistribution import changed_axes

from ..collectives import DeviceGroups
from ..functions import arguments_of, is_onnx, named, on_device, only, returns_sequence
from ..local_call import LocalOperator
from ..postponing import product
from ..redistribution import ON_ONE_DEVICE, Chain, arrive, depart, step, step_actions
from .draft import Coming, Draft
from .frame import Frame
from .program import LocalProgram, Place, Time, identifier

Arrival = tuple[str, Layout]
"""A value that another stage hands on, and the layout in which it comes."""


def lower(program: Program, groups: DeviceGroups, *, device: torch.device | str = "cpu") -> LocalProgram:
    """The local program of this rank; nodes carry the names of operators and tensors."""
    return lower_scheduled(scheduled(program), groups, device=device)


def lower_scheduled(
    plan: Scheduled,
    groups: DeviceGroups,
    *,
    device: torch.device | str = "cpu",
    time: Time | None = None,
    arrivals: Sequence[Arrival] = (),
    handed: Sequence[Arrival] = (),
    late: bool = False,
) -> LocalProgram:
    """As `lower`, under a schedule; with `time`, of one micro-batch (`plan` is that of the whole batch).

    `arrivals` come from other stages; `handed` go to others. `late`: weight gradients of matrix products may be made
    apart from those of values.
    """
    return _Builder(plan, groups, torch.device(device), time, arrivals, late=late).run(handed)


def same_operators(plan: Scheduled, groups: DeviceGroups, one: Time, other: Time) -> bool:
    """Whether two micro-batches run the same local operators, so that one program serves both."""
    first, second = Frame(plan, groups, one), Frame(plan, groups, other)
    computed = (item for item in plan.program.steps if isinstance(item, Compute) and first.runs(item))
    return all(first.local(item) == second.local(item) for item in computed)


def lower_preamble(
    plan: Scheduled, groups: DeviceGroups, names: Sequence[str], *, device: torch.device | str = "cpu"
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """A module that makes the whole preamble values `names` from constants and inputs, and the names of those."""
    return _Builder(plan, groups, torch.device(device), None, ()).preamble(names)


class _Builder:
    """Lowers step after step into the draft of the segment at hand."""

    def __init__(
        self,
        plan: Scheduled,
        groups: DeviceGroups,
        device: torch.device,
        time: Time | None,
        arrivals: Sequence[Arrival],
        *,
        late: bool = False,
    ) -> None:
        self.late = late
        self.plan, self.program, self.model, self.device, self.time = plan, plan.program, plan.program.graph, device, time
        self.frame = Frame(plan, groups, time)
        self.drafts: list[Draft] = []
        self.draft = Draft(0, again=False)
        self.made = {self.frame.place(*arrival): -1 for arrival in arrivals}
        # Sources that are cut for the micro-batch when read; inputs of the whole batch are read on their own device.
        self.whole_sources = set(self.model.inputs)
        if time is not None:
            decided = self.program.assignment.decisions
            once = (op for op in self.model.operators if op.name in decided and decided[op.name].rule is None)
            self.whole_sources |= {name for op in once for name in op.outputs}
            self.whole_sources |= {t.name for t in self.model.tensors.values() if t.role is Role.CONSTANT}

    def run(self, handed: Sequence[Arrival]) -> LocalProgram:
        """Lower every segment in its order."""
        for number, segment in enumerate(self.plan.segments):
            self.draft = Draft(number, again=segment.again and self.plan.trains)
            self.drafts.append(self.draft)
            for index in segment.steps:
                self._step(index)
            for place in tuple(self.draft.coming):
                self._value(place)
        outputs = self._outputs()
        places = tuple(self.frame.place(*pair) for pair in outputs)
        updates = tuple(self._updates())
        given = tuple(self.frame.place(*value) for value in handed)
        final = dict.fromkeys((*places, *(place for _, place in updates), *given))
        for place in final:
            self._value(place)  # values that leave the program leave its last segment
        read = {place for draft in self.drafts for place in draft.values}
        gradients = self.program.assignment.gradients
        names = [name for name, _ in outputs]
        return LocalProgram(
            segments=tuple(draft.finish(self._given(draft, read, final), gradients) for draft in self.drafts),
            outputs=tuple((name, self.frame.joined(name, layout)) for name, layout in outputs),
            output_places=places,
            updates=updates,
            handed=given,
            loss=names.index(self.model.loss) if self.model.loss in names else None,
        )

    def _given(self, draft: Draft, read: Container[Place], final: Iterable[Place]) -> tuple[Place, ...]:
        """The outputs of a segment: values that later segments read; for the last one, all that leaves the program."""
        own = [place for place in draft.nodes if place in read and self.made.get(place) == draft.number]
        return tuple(dict.fromkeys((*own, *(final if draft is self.drafts[-1] else ()))))

    def preamble(self, names: Sequence[str]) -> tuple[fx.GraphModule, tuple[str, ...]]:
        """Lower the operators behind `names`, which are whole."""
        needed, behind = set(names), []
        for operator in reversed(self.model.operators):
            if not needed.isdisjoint(operator.outputs):
                behind.append(operator)
                needed.update(operator.inputs)
        whole = replicated(len(self.frame.axes))
        given = tuple(name for name, t in self.model.tensors.items() if name in needed and t.role in (Role.INPUT, Role.CONSTANT))
        for name in given:
            self._arrived((name, whole))
        for operator in reversed(behind):
            self._compute(Compute(operator=operator, decision=self.program.assignment.decisions[operator.name]))
        self.draft.graph.output(tuple(self._value((name, whole)) for name in names))
        return fx.GraphModule(torch.nn.Module(), self.draft.graph, class_name="Preamble"), given

    def _outputs(self) -> tuple[tuple[str, Layout], ...]:
        """The outputs made here, with the loss behind them if it is no output."""
        planned = self.program.assignment.outputs
        names = dict.fromkeys((*self.model.outputs, *((self.model.loss,) if self.model.loss else ())))
        return tuple((name, planned[name]) for name in names if name in planned)

    def _updates(self) -> list[tuple[str, Place]]:
        """The constants that change here; those with new values from the preamble change with it."""
        whole, planned = replicated(len(self.frame.axes)), self.program.assignment.outputs
        found = ((name, fresh) for name, fresh in self.model.updates.items() if fresh in planned)
        return [(n, self.frame.place(fresh, whole)) for n, fresh in found if self.time is None or fresh not in self.whole_sources]

    # --- values ---

    def _value(self, place: Place) -> fx.Node:
        """A value: made in this segment or before it, a parameter, or a source."""
        draft = self.draft
        if place in draft.coming:
            self._arrive(place)
        if place in draft.nodes:
            return draft.nodes[place]
        name, role = place[0], self.model.tensors[place[0]].role
        if role is Role.PARAMETER:
            return draft.parameter(place)
        if place in self.made:
            return draft.value(place)
        if name in self.whole_sources or (role is Role.CONSTANT and place[1] == replicated(len(self.frame.axes))):
            return self._arrived(place)
        raise PlanError(f"the plan reads {name!r} as [{format_layout(place[1])}] before it is made")

    def _made(self, place: Place, node: fx.Node) -> None:
        self.draft.nodes[place] = node
        self.made[place] = self.draft.number

    def _arrived(self, place: Place) -> fx.Node:
        """A source on this rank's device; only the read part of an input gets there."""
        value = self._source(place)
        if self.model.tensors[place[0]].role is Role.INPUT and self.device.type != "cpu":
            value = self.draft.graph.create_node("call_method", "to", (value, self.device), name=f"{identifier(place[0])}_here")
        self._made(place, value)
        return value

    def _source(self, place: Place) -> fx.Node:
        """A value that comes whole (cut for the micro-batch), in the layout in which it is read."""
        draft = self.draft
        if place in draft.hosted:
            return draft.hosted[place]
        name, times = place[0], 0 if self.time is None else 1
        lead, layout = place[1][:times], place[1][times:]
        if all(p == R for p in layout):
            value = draft.source((name, lead[0] if lead else None))
        else:
            chain = next((c for c in self.program.assignment.chains.get(name, ()) if c[-1] == layout), None)
            if chain is None:
                raise PlanError(f"the plan has no redistribution of {name!r} to [{format_layout(layout)}]")
            actions = self._chain(tuple((*lead, *c) for c in chain))
            start = name, (*lead, *chain[0])
            local = all(ahead.name in ON_ONE_DEVICE for ahead, _, _ in actions)
            hosted = self.model.tensors[name].role is Role.INPUT and local
            value = self._source(start) if hosted else self._value(start)
            for ahead, _, group in actions:
                value = draft.graph.create_node("call_function", step, (value, ahead, None, group), name=f"{identifier(name)}_part")
        draft.hosted[place] = value
        return value

    # --- steps ---

    def _step(self, index: int) -> None:
        item = self.program.steps[index]
        if isinstance(item, Compute):
            if self.frame.runs(item):
                self._compute(item)
        elif item.tensor not in self.whole_sources:
            self._redistribute(item)

    def _chain(self, chain: Sequence[Layout]) -> Chain:
        """The actions of a redistribution."""
        frame, found = self.frame, []
        for before, after in itertools.pairwise(chain):
            found.append((*step_actions(before, after, frame.mesh), frame.over(changed_axes(before, after))))
        return tuple(found)

    def _redistribute(self, item: Redistribute) -> None:
        """Begin the first collective of a chain; the value's first use waits for it and runs the rest of the chain."""
        frame = self.frame
        places = [frame.place(item.tensor, layout) for layout in item.chain]
        coming = Coming(self._value(places[0]), item, self._chain([layout for _, layout in places]))
        first = departure(item, self.program.assignment.mesh.shape)
        coming = self._steps(coming, 0, len(coming.chain) if first is None else first)
        if first is None:
            self.draft.nodes[places[-1]] = coming.node
        else:
            self.draft.coming[places[-1]] = coming._replace(node=self._moved(coming, first, depart), number=first)
        self.made[places[-1]] = self.draft.number

    def _arrive(self, place: Place) -> None:
        """Wait for the value on its way to a place, and run the remaining steps."""
        coming = self.draft.coming.pop(place)
        coming = coming._replace(node=self._moved(coming, coming.number, arrive))
        self.draft.nodes[place] = self._steps(coming, coming.number + 1, len(coming.chain)).node

    def _steps(self, coming: Coming, first: int, end: int) -> Coming:
        """Run the steps of a chain from `first` to before `end`, a node each."""
        for number in range(first, end):
            coming = coming._replace(node=self._moved(coming, number, step))
        return coming

    def _moved(self, coming: Coming, number: int, function: Callable[..., object]) -> fx.Node:
        """A node for one step of a chain."""
        frame, item = self.frame, coming.item
        ahead, back, group = coming.chain[number]
        axes = "_".join(frame.axes[axis].name for axis in changed_axes(*item.chain[number : number + 2]))
        what = "leaves" if function is depart else "share" if ahead.name == "nothing" else ahead.name
        arguments = (coming.node, ahead, back if item.differentiable else None, group)
        node = self.draft.graph.create_node("call_function", function, arguments, name=f"{identifier(item.tensor)}_{what}_{axes}")
        if function is not depart:
            node.meta["tensor"] = _describe(self.model.tensors[item.tensor], item.chain[number + 1])
        return node

    def _compute(self, item: Compute) -> None:
        """One call with local sizes; a mean over a split factor is scaled."""
        operator, graph = item.operator, self.draft.graph
        local: LocalOperator = self.frame.local(item)
        inputs = [self._value(place) for place in self.frame.inputs(item)]
        arguments = arguments_of(local.function, local.attributes, inputs, self.device)
        function = on_device(local.function, self.device) if is_onnx(operator.kind) and not inputs else named(local.function)
        weights = self.frame.weights(item) if self.late else {}
        if weights:
            function = product(function, weights)
        result = graph.create_node("call_function", function, (), arguments, name=identifier(operator.name))
        results = self._unpack(result, operator, returns_sequence(local.function, operator))
        if local.scale != 1.0:
            results = [graph.call_function(torch.mul, (value, local.scale)) for value in results]
        for place, value in zip(self.frame.outputs(item), results, strict=True):
            value.meta["tensor"] = _describe(self.model.tensors[place[0]], place[1])
            self._made(place, value)

    def _unpack(self, result: fx.Node, operator: Operator, sequence: bool) -> list[fx.Node]:
        if sequence:
            return [
                self.draft.graph.create_node("call_function", python_operator.getitem, (result, i), name=identifier(output))
                for i, output in enumerate(operator.outputs)
            ]
        if is_onnx(operator.kind):
            return [self.draft.graph.call_function(only, (result,))]
        return [result]


def _describe(tensor: Tensor, layout: Layout) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} [{format_layout(layout)}]"
