"""Reads an exported PyTorch program as a `Graph`.

One walk over its fx graph makes writes in place functional on the way.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping
from typing import Any

import torch
from torch._functorch import predispatch
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import ModelError
from autopar.ir import Graph, Operator, Ref, Role, Value, needed_operators
from autopar.model import Check, TorchModel
from autopar.raising import raised

from .assertions import ASSERTS, SIZE, Number, checks_of, number_of, place_of
from .collected import Collected
from .experts import with_experts
from .forms import explicit, on_meta, plain_form, spelled_out
from .lanes import read_parts_together
from .losses import split_means
from .masks import with_masks_of_one_sequence, without_known_masks
from .state import RUNNING, functional, tracked
from .views import read_as_additions, read_as_views

# Arguments that say where or how memory lies; the runtime decides both.
_PLACEMENT_ARGUMENTS = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking"}
)
_DROPPED = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
_IN_PLACE = (
    "it changes {name!r} in the forward pass, which is no buffer of its own; make a new tensor "
    "instead"
)


def simplified(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with what the exported code writes at length in shorter forms, of equal values."""
    graph = read_as_views(read_parts_together(graph))
    graph = raised(with_experts(split_means(read_as_additions(graph))))
    return with_masks_of_one_sequence(without_known_masks(graph, constants), constants)


class Reader(Collected):
    """Walks an fx graph once, and collects its tensors and operators under stable names.

    `no_grad` regions are inlined.
    """

    def __init__(
        self, exported: torch.export.ExportedProgram, module: torch.nn.Module | None, name: str
    ) -> None:
        super().__init__()
        self.exported = exported
        self.name = name
        # A node → the first node that may share its memory.
        self.memory: dict[torch.fx.Node, torch.fx.Node] = {}
        self.inputs: list[str] = []
        # The place of an assertion, and the number that has to be true.
        self.asserted: list[tuple[str, Number]] = []
        # Whether the graph can be read without writes into views and transforms of functions only.
        self.hazards = False
        if module is not None:
            parameters = dict(module.named_parameters(remove_duplicate=False))
        else:
            parameters = dict(exported.named_parameters())
        self.frozen = {path for path, value in parameters.items() if not value.requires_grad}
        first: dict[torch.Tensor, str] = {}
        for path, value in parameters.items():
            first.setdefault(value, path)
        self.aliases = {
            path: first[value] for path, value in parameters.items() if first[value] != path
        }

    def read(self) -> TorchModel:
        for spec in self.exported.graph_signature.input_specs:
            self._placeholder(spec)
        outputs = self._walk(self.exported.graph_module)
        self.problems += [
            f"output {i} is a number made of data, not a tensor"
            for i, o in enumerate(outputs)
            if isinstance(o, Number)
        ]
        specs = self.exported.graph_signature.output_specs
        self.updates |= {
            str(s.target): outputs[i]
            for i, s in enumerate(specs)
            if s.kind is OutputKind.BUFFER_MUTATION
        }
        mutated = self.exported.graph_signature.user_inputs_to_mutate.values()
        self.problems += [_IN_PLACE.format(name=name) for name in mutated]
        self.problems = self.unsettled_sizes() + self.problems
        if self.problems:
            raise ModelError(f"{self.name}: " + "; ".join(dict.fromkeys(self.problems)))
        kinds = [str(spec.kind.name) for spec in self.exported.graph_signature.output_specs]
        given = next(node for node in self.exported.graph.nodes if node.op == "output").args[0]
        fixed = [None if isinstance(argument, torch.fx.Node) else argument for argument in given]
        wanted = [i for i, kind in enumerate(kinds) if kind in ("USER_OUTPUT", "LOSS_OUTPUT")]
        outputs = [outputs[i] if fixed[i] is None else None for i in wanted]
        values = tuple(fixed[i] for i in wanted)
        graph = Graph(
            name=self.name,
            tensors=self.tensors,
            operators=needed_operators(
                self.operators,
                [*(o for o in outputs if isinstance(o, str)), *self.updates.values()],
            ),
            inputs=tuple(self.inputs),
            outputs=tuple(dict.fromkeys(o for o in outputs if isinstance(o, str))),
            updates=self.updates,
        )
        spec = self.exported.call_spec
        assert spec.in_spec is not None and spec.out_spec is not None
        return TorchModel(
            graph=graph,
            constants=self.constants,
            buffers=tuple(self.buffers),
            aliases=self.aliases,
            in_spec=spec.in_spec,
            out_spec=spec.out_spec,
            output_names=tuple(o if isinstance(o, str) else None for o in outputs),
            output_values=values,
            checks=self._checks(),
        )

    def _checks(self) -> tuple[Check, ...]:
        """The checks that the program's assertions make of a call's data."""
        return checks_of(self.asserted, self.operators, frozenset({*self.inputs, *self.constants}))

    def _placeholder(self, spec: Any) -> None:
        node = next(
            n
            for n in self.exported.graph.nodes
            if n.op == "placeholder" and n.name == getattr(spec.arg, "name", None)
        )
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.values[node] = value
            return
        role = Role.INPUT
        name = node.name
        if spec.kind is InputKind.PARAMETER:
            role = Role.PARAMETER
            name = self.aliases.get(spec.target, spec.target)
        elif spec.kind is not InputKind.USER_INPUT:
            role = Role.CONSTANT
            name = spec.target
            if spec.kind is InputKind.BUFFER:
                self.buffers.append(name)
            else:
                self.constants[name] = self.exported.constants[name]
        self.values[node] = name
        if name not in self.tensors:
            self.declare(
                name,
                value,
                role,
                trainable=role is Role.PARAMETER
                and value.is_floating_point()
                and name not in self.frozen,
            )
            if role is Role.INPUT:
                self.inputs.append(name)

    def _walk(self, graph_module: torch.fx.GraphModule) -> list[Any]:
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                self._call(node, graph_module)
            elif node.op == "get_attr":
                self.values[node] = getattr(graph_module, str(node.target), None)
                if isinstance(self.values[node], torch.Tensor):
                    self.attribute_constant(node)
            elif node.op == "output":
                return [self.values[a] if isinstance(a, torch.fx.Node) else a for a in node.args[0]]
        return []

    def _call(self, node: torch.fx.Node, graph_module: torch.fx.GraphModule) -> None:
        target = node.target
        if target is python_operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            shared = self.memory.get(node.args[0], node)  # type: ignore[arg-type]
            # The fresh results of one operator do not share memory with each other.
            self.memory[node] = node if shared is node.args[0] else shared
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._region(node, graph_module)
        elif str(target) == SIZE:
            self.values[node] = self._size(*node.args)
        elif (number := number_of(target, [self._argument(a) for a in node.args])) is not None:
            self.values[node] = number
        elif str(target) == ASSERTS:
            asserted = self._argument(node.args[0])
            self.asserted += [(place_of(node), asserted)] if isinstance(asserted, Number) else []
        elif not isinstance(target, torch._ops.OpOverload):
            self.problems.append(f"{node.name!r} calls {target}, which is no tensor operator")
            # `torch.vmap` is written down as calls around its operators.
            self.hazards |= getattr(target, "__module__", "") == predispatch.__name__
            self.values[node] = self.results(node, node.name)
        elif str(target) not in _DROPPED:
            self._operator(node, target)

    def _size(self, tensor: Any, dim: Any) -> int:
        shape = self.tensors[self.values[tensor]].shape
        return int(shape[dim])

    def _argument(self, argument: Any) -> Any:
        """The tensor's name, the number or the plain value that a node is given."""
        return self.values.get(argument) if isinstance(argument, torch.fx.Node) else argument

    def _region(self, node: torch.fx.Node, graph_module: torch.fx.GraphModule) -> None:
        """Inline `no_grad` and autocast regions; refuse control flow by name."""
        kind = str(node.target)
        if kind not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self.problems.append(
                f"{node.name!r} is a {kind} region; control flow inside a model cannot be split"
            )
            self.values[node] = self.results(node, node.name)
            return
        arguments = [a for a in node.args if isinstance(a, torch.fx.Node)]
        body = self.values[arguments[0]]
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for inner, outer in zip(placeholders, arguments[1:], strict=True):
            self.values[inner] = self.values[outer]
        results = self._walk(body)
        stops = kind == "wrap_with_set_grad_enabled" and node.args[0] is False
        self.values[node] = [self.detached(value) for value in results] if stops else results

    def _operator(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        shared = next(
            (
                a
                for a in node.args
                if isinstance(a, torch.fx.Node)
                and any(r.alias_info for r in target._schema.returns)
            ),
            node,
        )
        self.memory[node] = self.memory.get(shared, shared)
        changed = self._changed_buffer(node, target)
        written = target
        target = self._out_of_place(node, target)
        in_place = target is not written
        inputs: list[str] = []
        attributes: dict[str, Value] = {}
        given = spelled_out(written, target, node)
        counting = tracked(target, given)
        if counting:
            target, given = functional(given)
        target, given = explicit(target, given)
        for argument in target._schema.arguments:
            if argument.name in given and argument.name not in _PLACEMENT_ARGUMENTS:
                value = given[argument.name]
                if isinstance(value, complex) and str(argument.type) == "Tensor":
                    inputs.append(self.complex_constant(node, argument.name, value))
                    attributes[argument.name] = Ref(len(inputs) - 1)
                else:
                    attributes[argument.name] = self._value(value, inputs)
        if node.meta.get("val") is None:
            return
        name = self.operator_name(node)
        made = self.results(node, name)
        outputs = (made,) if isinstance(made, str) else tuple(made)
        if counting:
            outputs = (*outputs, *self.statistics(name, [given[running] for running in RUNNING]))
        wide = self._promoted(node, target, given, name) if in_place else None
        self.operators.append(
            Operator(
                name=name,
                kind=str(target),
                inputs=tuple(inputs),
                outputs=(wide,) if wide else outputs,
                attributes=attributes,
            )
        )
        if wide:
            dtype = self.tensors[outputs[0]].dtype
            cast: dict[str, Value] = {"self": Ref(0), "dtype": dtype}
            self.derived("aten.to.dtype", self._unique(f"{name}.to"), wide, outputs[0], cast)
        self.values[node] = made
        if changed is not None:
            assert isinstance(made, str)
            self.updates[changed] = made

    def _changed_buffer(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> str | None:
        """The buffer that an operator changes in place as a whole."""
        base = node.args[0] if node.args else None
        if not isinstance(base, torch.fx.Node) or not any(
            a.alias_info and a.alias_info.is_write for a in target._schema.arguments
        ):
            return None
        return self.buffer_of(self.values[base])

    def _out_of_place(
        self, node: torch.fx.Node, target: torch._ops.OpOverload
    ) -> torch._ops.OpOverload:
        """Turn `x.relu_()` into `relu(x)`: later readers of `x` are made to read the result."""
        mutable = [
            a
            for a in target._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if not mutable:
            return target
        base = node.args[0] if node.args else None
        plain = plain_form(target)
        if isinstance(base, torch.fx.Node):
            source = self.tensors.get(str(self.values.get(base)))
        else:
            source = None
        if plain is None or source is None:
            self.problems.append(
                f"{node.name!r} ({target}) changes a tensor in place and has no plain form"
            )
            self.hazards = True
            return target
        root = self.tensors.get(str(self.values.get(self.memory[node])))
        whole = (
            root is not None
            and root.name in self.buffers
            and self._changed_buffer(node, target) is not None
        )
        if root is not None and root.role is not Role.ACTIVATION and not whole:
            self.problems.append(_IN_PLACE.format(name=root.name))
        assert isinstance(base, torch.fx.Node)
        self._rename_after(base, node)
        family = [
            other
            for other, first in self.memory.items()
            if first is self.memory[node] and other is not node
        ]
        if any(
            user > node
            for other in (*family, self.memory[node])
            if other is not node
            for user in other.users
        ):
            self.problems.append(
                f"{node.name!r} ({target}) changes a tensor in place of which a view is read "
                "later; write it out of place"
            )
            self.hazards = True
        return plain

    def _promoted(
        self,
        node: torch.fx.Node,
        target: torch._ops.OpOverload,
        given: Mapping[str, Any],
        name: str,
    ) -> str | None:
        """The result of an out-of-place form in the type that its arguments give it.

        In place it has the type of the tensor that is changed; None where that is the same.
        """
        _, made = on_meta(target, given)
        if not isinstance(made, torch.Tensor) or made.dtype == node.meta["val"].dtype:
            return None
        self.declare(f"{name}:promoted", made)
        return f"{name}:promoted"

    def _rename_after(self, base: torch.fx.Node, node: torch.fx.Node) -> None:
        base.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)

    def _value(self, value: Any, inputs: list[str]) -> Value:
        """An argument of a call as an attribute; a tensor is added to `inputs`, and referred to."""
        if isinstance(value, torch.fx.Node):
            known = self.values[value]
            if isinstance(known, Number):
                self.problems.append(
                    f"{value.name!r} ({value.target}) gives a number, not a tensor"
                )
                return None
            if not isinstance(known, str):
                return self._value(known, inputs)
            inputs.append(known)
            return Ref(len(inputs) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(self._value(v, inputs) for v in value)
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self.problems.append(f"an argument of type {type(value).__name__} cannot be read")
        return None
