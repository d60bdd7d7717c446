"""Methods of a global tensor that are no operators: gradients, flags, reads of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.sharding.redistribution import without_gradient

from .tensor import GlobalTensor, gradient_kinds

_T: Any = torch.Tensor


def _backward(
    tensor: GlobalTensor,
    gradient: GlobalTensor | None = None,
    retain_graph: bool | None = None,
    **more: Any,
) -> None:
    """Run the backward pass on all ranks, from a number or from a gradient in any layout."""
    if more.get("create_graph") or more.get("inputs") is not None:
        raise UsageError(
            "global tensors have first derivatives of all leaves; leave out create_graph and inputs"
        )
    root = tensor.summed()
    if gradient is None:
        if tensor.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        given = torch.ones_like(root.part)
    else:
        if not isinstance(gradient, GlobalTensor) or gradient.shape != tensor.shape:
            raise UsageError("the gradient of a global tensor is a global tensor of its shape")
        given = _detached(gradient).to_global(placement=root.placement, sbp=root.sbp).part
    torch.autograd.backward([root.part], [given], retain_graph=retain_graph)


def _gradient(tensor: GlobalTensor) -> GlobalTensor | None:
    held = tensor.part.grad
    if held is None:
        return None
    return GlobalTensor(held, gradient_kinds(tensor.kinds), tensor.placement, tensor.shape)


def _set_gradient(tensor: GlobalTensor, value: GlobalTensor | None) -> None:
    if value is None:
        tensor.part.grad = None
        return
    kinds = gradient_kinds(tensor.kinds)
    tensor.part.grad = _detached(value).to_global(placement=tensor.placement).brought(kinds).part


def _require(tensor: GlobalTensor, requires_grad: bool = True) -> GlobalTensor:
    tensor.part.requires_grad_(requires_grad)
    return tensor


def _detached(tensor: GlobalTensor) -> GlobalTensor:
    kinds = without_gradient(tensor.kinds)
    return GlobalTensor(tensor.part.detach(), kinds, tensor.placement, tensor.shape)


def _described(tensor: GlobalTensor, **_: Any) -> str:
    return (
        f"GlobalTensor(shape={list(tensor.shape)}, dtype={tensor.dtype}, {tensor.placement}, "
        f"sbp={tensor.sbp})"
    )


def _asked(name: str) -> Callable[..., Any]:
    """A method answered by the plain whole tensor; all ranks call it."""

    def answer(tensor: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.full(), name)(*args, **kwargs)

    return answer


_ASKED = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__format__")
OWN: Mapping[Any, Callable[..., Any]] = {
    _T.backward: _backward,
    _T.grad.__get__: _gradient,
    _T.grad.__set__: _set_gradient,
    _T.grad.__delete__: lambda tensor: _set_gradient(tensor, None),
    _T.requires_grad.__get__: lambda tensor: tensor.part.requires_grad,
    _T.requires_grad.__set__: _require,
    _T.requires_grad_: _require,
    _T.is_leaf.__get__: lambda tensor: tensor.part.is_leaf,
    _T.grad_fn.__get__: lambda tensor: tensor.part.grad_fn,
    _T.retain_grad: lambda tensor: tensor.part.retain_grad(),
    _T.detach: _detached,
    _T.data.__get__: _detached,
    _T.__repr__: _described,
    _T.__iter__: lambda tensor: iter(tensor.unbind(0)),
    **{getattr(_T, name): _asked(name) for name in _ASKED},
}
"""The methods by the functions that torch hands to `__torch_function__`."""
