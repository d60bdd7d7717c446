"""Marks that a user leaves on modules and parameters.

They are cuts of operators, attributes of operators, and parameters of one rank.

They are ordinary attributes, so they stay where a module is copied or saved, and nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import UsageError, unknown

Cuts = tuple[tuple[int, ...], ...]
"""For every input of an operator, into how many parts each of its dims is cut."""

CUTS = "autopar_cuts"
ATTRIBUTES = "autopar_attributes"
OWN = "layerwise_parallel"
VALID = ("cross_batch", "fusion")


def shard(target: Any, cuts: Sequence[Sequence[int]]) -> Any:
    """Cut the inputs of an operator: mark a module and return it, or make a module of a function.

    `shard(torch.matmul, ((4, 1), (1, 1)))` returns a module. `cuts` has one tuple for each input,
    with the number of equal parts of every dim. Devices that no cut needs hold copies. A module
    must hold one operator that takes such inputs. The cuts count in the modes semi_auto_parallel
    and auto_parallel.
    """
    checked = _checked(cuts)
    if not hasattr(target, "named_modules"):
        if not callable(target):
            raise UsageError(
                f"shard takes a module or a function of tensors, not {type(target).__name__}"
            )
        from autopar.runtime.models.operator_module import OperatorModule

        target = OperatorModule(target)
    setattr(target, CUTS, checked)
    return target


def _checked(cuts: Sequence[Sequence[int]]) -> Cuts:
    example = "as ((4, 1), (1, 1))"
    if not isinstance(cuts, tuple | list) or not cuts:
        raise UsageError(f"cuts {cuts!r} are no tuple of tuples, one for each input, {example}")
    for one in cuts:
        if not isinstance(one, tuple | list) or any(
            isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in one
        ):
            raise UsageError(
                f"cuts {cuts!r}: {one!r} is no tuple of whole numbers from 1 on, one for each dim, "
                f"{example}"
            )
    return tuple(tuple(one) for one in cuts)


def add_prim_attr(target: Any, name: str, value: Any) -> Any:
    """Set an attribute of a module's operators, and return the module.

    `cross_batch`: if True, a reduction over the batch reduces each rank's part alone, as data
    parallelism does. `fusion`: gradients of modules with equal numbers are reduced together; 0:
    each of the module's gradients alone.
    """
    if name not in VALID:
        raise UsageError(unknown("attribute of an operator", name, VALID))
    if not hasattr(target, "named_modules"):
        raise UsageError(
            f"attributes belong to modules; give autopar.shard the function {target!r} first, "
            "which makes one of it"
        )
    if name == "cross_batch" and not isinstance(value, bool):
        raise UsageError(f"cross_batch is {value!r}; it is True or False")
    if name == "fusion" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UsageError(
            f"fusion is {value!r}; it is a whole number from 0 on, and 0 keeps each reduction by "
            "itself"
        )
    setattr(target, ATTRIBUTES, {**getattr(target, ATTRIBUTES, {}), name: value})
    return target


def layerwise_parallel(parameter: Any, value: bool = True) -> Any:
    """Mark a parameter as each rank's own in the mode hybrid_parallel, and return it.

    Its gradient is not reduced.
    """
    if not hasattr(parameter, "requires_grad") or hasattr(parameter, "named_modules"):
        raise UsageError(f"layerwise_parallel marks parameters, not {type(parameter).__name__}")
    setattr(parameter, OWN, bool(value))
    return parameter


def marked(module: Any, mark: str) -> Iterator[tuple[str, Any]]:
    """The paths of the marked modules, with their marks; none of an ONNX model."""
    for path, part in module.named_modules() if hasattr(module, "named_modules") else ():
        if mark in vars(part):
            yield path, vars(part)[mark]


def strays(module: Any, mark: str) -> Iterator[str]:
    """The names under which a module reaches marked modules that are no attributes of its own.

    They are in lists and dicts of the module, or global names of its forward pass: no path of the
    model leads to them, so their marks would count for nothing.
    """
    for path, part in module.named_modules() if hasattr(module, "named_modules") else ():
        before = f"{path}." if path else ""
        for name, value in vars(part).items():
            # Torch holds parameters and modules in dicts of its own.
            if not name.startswith("_") and any(_has(one, mark) for one in _members(value)):
                yield f"{before}{name}"
        code = getattr(type(part).forward, "__code__", None)
        known = getattr(type(part).forward, "__globals__", {})
        for name in code.co_names if code is not None else ():
            if _has(known.get(name), mark):
                yield f"{before or type(part).__name__ + '.'}forward: {name}"


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set) else ()


def _has(value: Any, mark: str) -> bool:
    return hasattr(value, "named_modules") and mark in vars(value)


def own_parameters(module: Any) -> tuple[str, ...]:
    """The names of the parameters of which every rank has its own."""
    named = module.named_parameters() if hasattr(module, "named_parameters") else ()
    return tuple(name for name, value in named if getattr(value, OWN, False))
