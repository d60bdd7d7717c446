"""Torch's functions on global tensors, traced into operators with their cheapest splits.

The methods that need no operator are in `own_methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import UsageError
from autopar.ir import Graph, Operator
from autopar.runtime.local_forms.randomness import draws_numbers
from autopar.runtime.lowering.localise import localise
from autopar.runtime.operators.functions import arguments_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.sharding.layout import Layout
from autopar.sharding.program import Decision
from autopar.sharding.redistribution import without_gradient

from .choosing import decide
from .handing import stand_in
from .own_methods import OWN
from .placement import TensorPlacement
from .tensor import RUNS, GlobalTensor
from .tracing import Traced, trace

_T: Any = torch.Tensor
_PLAIN = frozenset(
    {
        _T.shape.__get__,
        _T.dtype.__get__,
        _T.device.__get__,
        _T.ndim.__get__,
        _T.layout.__get__,
        _T.size,
        _T.dim,
        _T.numel,
        _T.nelement,
        _T.is_floating_point,
        _T.is_complex,
        _T.element_size,
        _T.itemsize.__get__,
        _T.nbytes.__get__,
        _T.__len__,
        _T.is_cuda.__get__,
        _T.is_sparse.__get__,
        _T.is_quantized.__get__,
        _T.is_meta.__get__,
        _T.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        _T.is_nested.__get__,
        _T._version.__get__,
    }
)
"""Functions that need only the shape and the type."""

_TRACES: dict[object, Traced] = {}
_DECISIONS: dict[object, Decision] = {}
MOST = 4096
"""Traces and decisions that are remembered."""


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on global tensors."""
    if function in _PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if function in OWN:
        return OWN[function](*args, **kwargs)
    name = getattr(function, "__name__", str(function))
    if name == "__set__":
        raise UsageError("this attribute of a global tensor cannot be set; make a new tensor")
    if _changes_in_place(name):
        return _in_place(name, args, kwargs)
    if kwargs.get("out") is not None:
        raise UsageError(f"{name}(out=...) of global tensors: take what the function returns")
    return operate(function, args, kwargs)


# --- operators ---


def operate(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of global tensors, operator by operator."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [
        _number(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, GlobalTensor) else leaf
        for leaf in leaves
    ]
    given = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
    where = _one_placement(given)
    traced = _traced(function, leaves, spec, given)
    values = {f"in{i}": (tensor.part, tensor.kinds) for i, tensor in enumerate(given)}
    for operator in traced.graph.operators:
        _run(traced.graph, operator, values, where)
    tensors = traced.graph.tensors
    outputs: dict[str, GlobalTensor] = {}
    for name in traced.graph.outputs:
        part, kinds = values[name]
        outputs[name] = GlobalTensor(part, kinds, where, tensors[name].shape)
    results = [
        outputs.get(result, result) if isinstance(result, str) else result
        for result in traced.results
    ]
    return pytree.tree_unflatten(results, traced.spec)


def _number(value: Tensor) -> Any:
    """A plain tensor among global ones: only a number is the same for all ranks."""
    if value.dim() or value.requires_grad:
        raise UsageError(
            f"a plain tensor of shape {list(value.shape)} beside global ones: bring it there with "
            "autopar.to_global first"
        )
    return value.item()


def _one_placement(given: Sequence[GlobalTensor]) -> TensorPlacement:
    first = given[0].placement
    for tensor in given[1:]:
        if tensor.placement != first:
            raise UsageError(
                f"operands lie on {first} and {tensor.placement}: bring one to the other's with "
                "x.to_global(placement=...)"
            )
    return first


def _traced(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    given: Sequence[GlobalTensor],
) -> Traced:
    key: object = None
    try:
        told = tuple(
            (tuple(x.shape), x.dtype) if isinstance(x, GlobalTensor) else (type(x), x)
            for x in leaves
        )
        key = function, spec, told
        if key in _TRACES:
            return _TRACES[key]
    except TypeError:  # an argument that has no hash
        key = None

    def on(*values: Tensor) -> Any:
        rest = iter(values)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, GlobalTensor) else leaf for leaf in leaves], spec
        )
        return function(*args, **kwargs)

    traced = trace(
        on,
        [torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta") for tensor in given],
    )
    if key is not None:
        _remember(_TRACES, key, traced)
    return traced


def _remember(table: dict[object, Any], key: object, value: Any) -> None:
    if len(table) >= MOST:
        table.clear()
    table[key] = value


def _run(
    graph: Graph,
    operator: Operator,
    values: dict[str, tuple[Tensor, Layout]],
    where: TensorPlacement,
) -> None:
    """Run one operator: choose its split, bring the inputs there, compute on the parts."""
    if draws_numbers(operator):
        raise UsageError(
            f"{operator.kind} draws random numbers: draw them with autopar.randn, or plan the "
            "module, which counts them"
        )
    held = [values[name] for name in operator.inputs]
    flows = tuple(part.requires_grad and torch.is_grad_enabled() for part, _ in held)
    layouts = tuple(
        kinds if flow else without_gradient(kinds)
        for (_, kinds), flow in zip(held, flows, strict=True)
    )
    key = graph.operator_fingerprint(operator), layouts, where.mesh.shape, flows
    decision = _DECISIONS.get(key)
    if decision is None:
        decision = decide(graph, operator, layouts, where.mesh.shape, flows)
        _remember(_DECISIONS, key, decision)
    brought = [
        GlobalTensor(part, kinds, where, graph.tensors[name].shape).brought(wanted).part
        for name, (part, kinds), wanted in zip(operator.inputs, held, decision.inputs, strict=True)
    ]
    outputs = [graph.tensors[name] for name in operator.outputs]
    if where.here:
        results = _on_parts(graph, operator, decision, brought, where)
    else:
        dtypes = [getattr(torch, tensor.dtype) for tensor in outputs]
        results = [stand_in(dtype, where.device, brought) for dtype in dtypes]
    for tensor, part, kinds in zip(outputs, results, decision.outputs, strict=True):
        values[tensor.name] = part, kinds if part.requires_grad else without_gradient(kinds)


def _on_parts(
    graph: Graph,
    operator: Operator,
    decision: Decision,
    parts: Sequence[Tensor],
    where: TensorPlacement,
) -> list[Tensor]:
    groups = where.groups()
    local = localise(
        LocalCall(
            operator=operator,
            decision=decision,
            inputs=tuple(graph.tensors[n] for n in operator.inputs),
            outputs=tuple(graph.tensors[n] for n in operator.outputs),
            mesh=where.mesh.shape,
            coordinate=groups.coordinate,
            groups=groups.axes,
        )
    )
    outputs = local.function(**arguments_of(local.function, local.attributes, parts, where.device))
    results = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    return [value * local.scale for value in results] if local.scale != 1.0 else results


# --- in place ---


def _changes_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name in _INTO
    )


_INTO = {
    f"__i{name}__": f"__{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """Run the out-of-place form, and give its result to the tensor, in the tensor's layout."""
    target = args[0]
    assert isinstance(target, GlobalTensor)
    if target.part.requires_grad and target.part.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            "a leaf tensor that requires a gradient is changed in place; do it under "
            "torch.no_grad()"
        )
    if name == "copy_":
        made: Any = args[1]
        if not isinstance(made, GlobalTensor) or made.shape != target.shape:
            raise UsageError("copy_ takes a global tensor of the same shape")
    elif name in ("zero_", "fill_"):
        made = operate(torch.full_like, (target, 0 if name == "zero_" else args[1]), {})
    else:
        plain = getattr(torch.Tensor, _INTO.get(name, name[:-1]), None)
        if plain is None:
            raise UsageError(
                f"{name} has no form that gives a new tensor; it cannot change a global one"
            )
        made = operate(plain, args, kwargs)
    made = made.to_global(placement=target.placement, sbp=target.sbp)
    if torch.is_grad_enabled() and made.part.requires_grad:
        target.part = made.part
        target.kinds = made.kinds
    else:
        target.part.copy_(made.part.to(target.part.dtype))
    return target


RUNS.call = call
