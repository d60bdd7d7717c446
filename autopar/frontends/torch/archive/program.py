"""Rebuilds the program of an archive from harmless parts.

Torch evaluates the names and expressions of an archive as source code.

The rebuilt program holds identifiers, numbers, texts that are quoted where they are used, and
operators of `torch.ops`. Expressions of sizes, guards, annotations and example inputs are dropped.
A part that the model needs and that may be harmful becomes a doubt; a part of a wrong form is
`Malformed`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .entries import Doubts, Malformed
from .values import SIMPLE, integer, listed, one, open_size, shown, tensor_meta

REGIONS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Operators of `torch.ops.higher_order` that hold a part of the model rather than control flow."""
_VERIFIERS = frozenset({"", "ATEN", "TRAINING"})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
_CONTAINERS = {
    "builtins.tuple": "tuple",
    "builtins.list": "list",
    "builtins.dict": "dict",
    "collections.OrderedDict": "dict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Rebuilds one program.

    `operator` gives the objection against a target ("" if there is none).
    """

    doubts: Doubts
    operator: Callable[[str, str, str], str]

    def rebuilt(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The program, in the form of the file."""
        try:
            module = data["graph_module"]
            version = data["schema_version"]
            verifiers = [
                self._known(text, _VERIFIERS, "verifier")
                for text in listed(data.get("verifiers", []))
            ]
            return {
                "graph_module": {
                    "graph": self._graph(module["graph"]),
                    "signature": self._signature(module["signature"]),
                    "module_call_graph": [self._call(listed(module["module_call_graph"])[0])],
                },
                "opset_version": {},
                "range_constraints": {},
                "schema_version": {
                    "major": integer(version["major"]),
                    "minor": integer(version["minor"]),
                },
                "verifiers": verifiers,
            }
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise Malformed(
                f"its program lacks a field: {type(error).__name__}: {error}"
            ) from error
        except RecursionError as error:
            raise Malformed("its program is nested too deeply") from error

    # --- names ---

    def name(self, text: Any) -> str:
        """A name that stands in generated source code."""
        if not isinstance(text, str):
            raise Malformed(f"a name is {shown(text)}")
        if not _IDENTIFIER.fullmatch(text) or keyword.iskeyword(text) or text.startswith("__"):
            self.doubts.add(f"it names a value {shown(text)}, which is no identifier")
        return text

    def path(self, text: Any) -> str:
        """The dotted path of a parameter, buffer or constant."""
        if not isinstance(text, str):
            raise Malformed(f"the path of a parameter is {shown(text)}")
        if (
            not text.isprintable()
            or set("\"'\\{}()") & set(text)
            or any(not part or part.startswith("__") for part in text.split("."))
        ):
            self.doubts.add(f"it names a parameter {shown(text)}")
        return text

    def _known(self, text: Any, valid: frozenset[str], what: str) -> str:
        if text not in valid:
            raise Malformed(f"its {what} {shown(text)} is unknown")
        return str(text)

    # --- the graph ---

    def _graph(self, graph: Mapping[str, Any]) -> dict[str, Any]:
        for kind in ("sym_int_values", "sym_bool_values", "sym_float_values"):
            if graph.get(kind):
                raise Malformed(open_size(next(iter(graph[kind]))))
        if graph.get("custom_obj_values"):
            self.doubts.add(
                f"it holds the script object {shown(next(iter(graph['custom_obj_values'])))}"
            )
        return {
            "inputs": [self.argument(value) for value in listed(graph["inputs"])],
            "outputs": [self.argument(value) for value in listed(graph["outputs"])],
            "nodes": [self._node(node) for node in listed(graph["nodes"])],
            "tensor_values": {
                self.name(name): tensor_meta(meta, name)
                for name, meta in graph["tensor_values"].items()
            },
            "sym_int_values": {},
            "sym_bool_values": {},
            "is_single_tensor_return": graph.get("is_single_tensor_return") is True,
        }

    def _node(self, node: Mapping[str, Any]) -> dict[str, Any]:
        name = node.get("name")
        single = node.get("is_hop_single_tensor_return")
        return {
            "target": self._target(node["target"]),
            "inputs": [self._named(given) for given in listed(node["inputs"])],
            "outputs": [self.argument(value) for value in listed(node["outputs"])],
            "metadata": _stack(node.get("metadata") or {}),
            "is_hop_single_tensor_return": single if isinstance(single, bool) else None,
            "name": self.name(name) if name else None,
        }

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kind = given.get("kind")
        return {
            "name": self._argument_name(given["name"]),
            "arg": self.argument(given["arg"]),
            "kind": None if kind is None else integer(kind),
        }

    def _argument_name(self, text: Any) -> str:
        """The name of an operator's argument, which may be a word of Python (`from`)."""
        if isinstance(text, str) and (text == "" or keyword.iskeyword(text)):
            return text
        return self.name(text)

    def _target(self, text: Any) -> str:
        match = _OPERATOR.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            self.doubts.add(f"it calls {shown(text)}, which is no operator of torch.ops")
            return ""
        space, name, overload = match.groups()
        if space == "higher_order":
            if name not in REGIONS or overload is not None:
                raise Malformed(
                    f"it holds a {name} region; control flow inside a model cannot be split"
                )
        elif why := self.operator(space, name, overload or ""):
            self.doubts.add(f"it calls {shown(text)}, {why}")
        return str(text)

    def argument(self, value: Any) -> dict[str, Any]:
        """Read one argument, which is a union of one kind and its value."""
        kind, inner = one(value)
        if kind in ("as_custom_obj", "as_operator"):
            self.doubts.add(
                f"an argument of an operator is {shown(inner)}, a script object or a function"
            )
            return {"as_none": True}
        read = SIMPLE.get(kind)
        if read is not None:
            return {kind: read(inner)}
        if kind == "as_graph":
            return {kind: {"name": self.name(inner["name"]), "graph": self._graph(inner["graph"])}}
        if kind in (
            "as_tensor",
            "as_optional_tensor",
            "as_tensors",
            "as_optional_tensors",
            "as_nested_tensors",
        ):
            return {kind: self._tensors(inner)}
        raise Malformed(
            open_size(shown(inner))
            if kind.startswith("as_sym")
            else f"an argument is of the unknown kind {shown(kind)}"
        )

    def _tensors(self, value: Any) -> Any:
        """Tensors by name, in lists, or as an optional one's union."""
        if isinstance(value, list):
            return [self._tensors(item) for item in value]
        kind, inner = one(value)
        if kind == "as_none":
            return {"as_none": True}
        if kind == "as_tensor":
            return {"as_tensor": self._tensors(inner)}
        return {"name": self.name(one(value, "name")[1])}

    # --- how it is called ---

    def _signature(self, signature: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_specs": [self._spec(spec) for spec in listed(signature["input_specs"])],
            "output_specs": [self._spec(spec) for spec in listed(signature["output_specs"])],
        }

    def _spec(self, spec: Any) -> dict[str, Any]:
        """Rebuild the specification of one input or output: the argument and its meaning."""
        kind, inner = one(spec)
        if kind in ("custom_obj", "token"):
            self.doubts.add(f"an input or output is a {kind}")
            return {}
        rebuilt: dict[str, Any] = {}
        for key, value in inner.items():
            if key == "arg":
                if kind.startswith("user_") and kind != "user_input_mutation":
                    rebuilt[key] = self.argument(value)
                else:
                    rebuilt[key] = self._tensors(value)
            elif key == "persistent":
                rebuilt[key] = value is True
            elif key == "value":
                rebuilt[key] = self.argument(value)
            elif key in ("name", "user_input_name"):
                rebuilt[key] = self.name(value) if value else ""
            elif key in ("parameter_name", "buffer_name", "tensor_constant_name"):
                rebuilt[key] = self.path(value)
        return {_plain(kind): rebuilt}

    def _call(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        signature = entry["signature"]
        names = signature.get("forward_arg_names")
        into = self._structure(signature["in_spec"])
        for name in _keywords(into):
            self.name(name)
        return {
            "fqn": "",
            "signature": {
                "inputs": [],
                "outputs": [],
                "in_spec": json.dumps([1, into]),
                "out_spec": json.dumps([1, self._structure(signature["out_spec"])]),
                "forward_arg_names": [self.name(name) for name in listed(names)] if names else None,
            },
        }

    def _structure(self, text: Any) -> dict[str, Any]:
        """Rebuild the nesting of arguments or outputs.

        Only tuples, lists and dicts are read, since other types bring code.
        """
        try:
            protocol, spec = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise Malformed(f"the structure of its arguments is {shown(text)}") from error
        if protocol != 1:
            raise Malformed(f"the structure of its arguments is of protocol {shown(protocol)}")
        return self._nested(spec)

    def _nested(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        kind = spec["type"]
        children = [self._nested(child) for child in listed(spec["children_spec"])]
        if kind is None:
            return {"type": None, "context": None, "children_spec": []}
        if kind not in _CONTAINERS:
            self.doubts.add(
                f"its arguments or outputs are in a {shown(kind)}, which is no tuple, list or dict"
            )
            return {"type": None, "context": None, "children_spec": []}
        keys = json.loads(spec["context"]) if isinstance(spec["context"], str) else None
        plain = (
            isinstance(keys, list)
            and all(isinstance(key, (str, int)) for key in keys)
            and len(keys) == len(children)
        )
        if plain is not (_CONTAINERS[kind] == "dict") or (keys is not None and not plain):
            raise Malformed(f"the keys of its arguments are {shown(spec['context'])}")
        return {"type": kind, "context": json.dumps(keys), "children_spec": children}


def _keywords(spec: Mapping[str, Any]) -> list[str]:
    """The names of the keyword arguments in the structure of a call, ((arguments), {keywords})."""
    children = spec["children_spec"]
    if len(children) == 2 and children[1]["context"]:
        return list(json.loads(children[1]["context"]) or [])
    return []


def _stack(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The one annotation kept of a node, the path of its module: "key,path,type;..."."""
    text = metadata.get("nn_module_stack")
    return {"nn_module_stack": text} if isinstance(text, str) and text.isprintable() else {}


def _plain(text: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise Malformed(f"{shown(text)} stands where a kind must")
    return text
