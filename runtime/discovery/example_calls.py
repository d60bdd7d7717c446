"""Targets of a discovery as example calls: an operator's name, a function, a graph's operator."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError, DiscoveryError, RuleError, UnsupportedOperators, UsageError
from autopar.runtime.operators.functions import function_of, known_as
from autopar.runtime.proof import Disproved, Sample, sample
from autopar.sharding.rules import Entry

from .discover import MESHES, Discovery, discover, factor_names, in_double, prove_all
from .executed_calls import outputs_of, seeded

_PLAIN = (
    "it is a function, not an operator: planning sees what is inside it,"
    " unless torch.library.custom_op makes it one operator"
)


def discover_target(target: Any, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> Discovery:
    """The rule of an operator's name, of `package:function`, or of a callable.

    It is called with `inputs` and `arguments`.
    """
    if isinstance(target, str) and ":" in target.replace("::", ""):
        target, inputs, arguments = _named(target, inputs, arguments)
    kind = kind_of(target)
    if kind is not None:
        return discover(example(kind, inputs, arguments))
    if not callable(target):
        raise UsageError(f"{target!r} is no operator and no function")
    name = f"{target.__module__}.{getattr(target, '__qualname__', type(target).__name__)}"
    places = [f"input{i}" for i in range(len(inputs))]

    def call(**named: Any) -> Any:
        """The target, with its inputs by name, as operators are called."""
        placed = [named.pop(place) for place in places]
        return target(*placed, **named)

    with known_as(name, call):
        case = _sample(name, dict(zip(places, inputs, strict=True)) | dict(arguments))
        discovery = discover(case)
    return replace(discovery, notes=(*discovery.notes, _PLAIN))


def kind_of(target: Any) -> str | None:
    """The operator kind of a name or of an operator of torch; None for other callables."""
    if isinstance(target, str):
        name = target.replace("::", ".")
        kind = name if name.count(".") > 1 or name.startswith("onnx.") else f"{name}.default"
        try:
            function_of(kind)
        except UnsupportedOperators as error:
            raise UsageError(
                f"no operator {kind!r} is known: write namespace.name.overload,"
                " and import what defines it (--rules)"
            ) from error
        return kind
    target = getattr(target, "_opoverload", target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        names: list[str] = target.overloads()  # type: ignore[no-untyped-call]
        # Overloads differ in their arguments, so none of them is guessed.
        if "default" not in names and len(names) > 1:
            raise UsageError(f"{target} has the overloads {', '.join(names)}: say which")
        return f"{target}.{'default' if 'default' in names else names[0]}"
    return str(target) if isinstance(target, torch._ops.OpOverload) else None


def _named(
    text: str, inputs: Sequence[Any], arguments: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """The operator or function behind `package:function`, with example inputs if it has any.

    Inputs or arguments of the caller take precedence.
    """
    module_name, _, name = text.rpartition(":")
    # As `python -m` does: modules of the present directory can be imported.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
        target = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{text!r} cannot be imported: {error}") from error
    if inputs or arguments:
        return target, inputs, arguments
    beside = getattr(module, f"{name}_inputs", None)
    with seeded():
        if beside is not None:
            return target, _several(beside() if callable(beside) else beside), arguments
        result: Any = None
        if inspect.isfunction(target) and not _required(target):
            result = target()
    if not _is_example(result):
        raise UsageError(
            f"{text!r} must return (operator or function, example inputs[, keyword arguments]),"
            f" or be one beside {name}_inputs"
        )
    return result[0], _several(result[1]), result[2] if len(result) == 3 else {}


def _several(inputs: Any) -> Sequence[Any]:
    """Inputs as a sequence; a single one needs no tuple."""
    return inputs if isinstance(inputs, tuple | list) else (inputs,)


def _is_example(result: Any) -> bool:
    """Whether a result is an operator or function with its inputs, and arguments if it has any."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        return False
    return isinstance(result[0], str) or callable(result[0])


def _required(function: Callable[..., Any]) -> bool:
    """Whether a function cannot be called without arguments."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        p.default is p.empty and p.kind not in kinds
        for p in inspect.signature(function).parameters.values()
    )


def example(kind: str, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> Sample:
    """A call of an operator with `inputs` in the order of its arguments, others by name."""
    function = function_of(kind)
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
    else:
        names = [
            name
            for name, p in inspect.signature(function).parameters.items()
            if p.kind is not p.VAR_KEYWORD
        ]
    if len(inputs) > len(names):
        raise UsageError(
            f"{kind} takes {len(names)} arguments ({', '.join(names)}), not {len(inputs)}"
        )
    return _sample(kind, dict(zip(names, inputs, strict=False)) | dict(arguments))


def _sample(kind: str, arguments: Mapping[str, Any]) -> Sample:
    """The sample of a call, which must succeed."""
    with seeded(), torch.no_grad():
        try:
            return sample(kind, "", **arguments)
        except AutoparError:
            raise
        except Exception as error:
            first = str(error).splitlines()[0]
            raise DiscoveryError(
                f"{kind}: its example call fails: {type(error).__name__}: {first}"
            ) from error


def example_of_texts(
    target: str, inputs: str | None, settings: Sequence[str]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The example call that a command line describes.

    `inputs` are as `6x4,int64:6`, `settings` as `name=JSON`. Floats are of either sign, or positive
    where that gives results that are not finite.
    """
    arguments = {}
    for text in settings:
        name, equals, value = text.partition("=")
        try:
            arguments[name] = json.loads(value)
        except ValueError as error:
            raise UsageError(
                f"--set {text!r} is not of the form NAME=VALUE with a value in JSON"
            ) from error
        if not equals or not name:
            raise UsageError(f"--set {text!r} is not of the form NAME=VALUE")
    texts = inputs.split(",") if inputs is not None else []
    # Values of either sign tell a maximum from a sum of magnitudes.
    signed = tensors_of(texts, positive=False)
    kind = None if ":" in target.replace("::", "") else kind_of(target)
    if kind is not None:
        outputs = outputs_of(example(kind, signed, arguments))
        if not all(bool(value.isfinite().all()) for value in outputs):
            return tensors_of(texts, positive=True), arguments
    return signed, arguments


def tensors_of(texts: Sequence[str], *, positive: bool) -> list[Tensor]:
    """Random tensors of shapes in texts: `6x4` floats, `int64:6x4`, `bool:6`.

    `positive`: floats are between 0.2 and 0.8, else between -1 and 1.

    >>> [(t.dtype, tuple(t.shape)) for t in tensors_of(["6x4", "int64:3", ""], positive=True)]
    [(torch.float64, (6, 4)), (torch.int64, (3,)), (torch.float64, ())]
    """
    return [_random(text, i, positive) for i, text in enumerate(texts)]


def _random(text: str, seed: int, positive: bool) -> Tensor:
    """A random tensor of the shape and type in a text."""
    word, _, sizes = text.rpartition(":")
    dtype = getattr(torch, word or "float64", None)
    parts = sizes.split("x") if sizes else []
    if not isinstance(dtype, torch.dtype) or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--inputs {text!r} is not of the form 6x4 or int64:6x4")
    generator = torch.Generator().manual_seed(seed)
    return random_values(tuple(map(int, parts)), dtype, generator, positive=positive)


def random_values(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, positive: bool
) -> Tensor:
    """Random floats in double precision, integers below 4, or booleans."""
    if not dtype.is_floating_point:
        high = 2 if dtype is torch.bool else 4
        return torch.randint(0, high, shape, generator=generator).to(dtype)
    values = torch.rand(shape, dtype=torch.float64, generator=generator)
    return values * 0.6 + 0.2 if positive else values * 2 - 1


def prove_rule(kind: str, entry: Entry, samples: Sequence[Any]) -> None:
    """Prove a rule on a user's sample calls, which are tuples of arguments, or dicts by name.

    Raises `RuleError`.
    """
    calls = []
    for call in samples:
        if isinstance(call, Mapping):
            case = example(kind, (), call)
        else:
            case = example(kind, _several(call), {})
        calls.append(in_double(case))
    try:
        _, split = prove_all(kind, entry, calls, MESHES)
    except Disproved as error:
        raise RuleError(f"the rule of {kind} is not what it computes: {error}") from error
    factors = {name for case in calls for name in factor_names(case, kind, entry)}
    untried = sorted(factors - split)
    if untried:
        raise RuleError(
            f"the samples of {kind} leave a split of {', '.join(untried)} untried:"
            " their sizes should divide by 6"
        )
