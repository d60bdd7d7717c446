"""The calls that a calibration of a device repeats: products, a copy, attention, chains, an update.

Each function returns a call that needs no arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

ProductKey = tuple[str, int, int, int]
"""A product's dtype, m, n and k."""
AttentionShape = tuple[int, int, int, int]
SMALL = 64
CHAIN = 200
MOST_COPIES = 64
UPDATED_BYTES = 21 * 4
"""Bytes that AdamW reads and writes for an element, operator by operator, in float32."""


def kernel_calls(
    device: torch.device, wanted: Sequence[ProductKey], room: int, attention: AttentionShape
) -> dict[object, Callable[[], object]]:
    """Products by their key, attention, and a chain of launches.

    `room`: bytes of operands between two uses of the same one.
    """
    calls: dict[object, Callable[[], object]] = {}
    operands = {
        dtype: _noise(device, dtype, room, [key for key in wanted if key[0] == dtype])
        for dtype in dict.fromkeys(key[0] for key in wanted)
    }
    for dtype, m, n, k in wanted:
        calls[dtype, m, n, k] = _product(operands[dtype], m, n, k)
    # On a CPU the host starts and computes an operator; a GPU does so with kernels alone.
    calls["launch"] = _kernels(device) if device.type == "cuda" else chain_call(device)
    calls["forward"] = _attention(device, attention, backward=False)
    calls["backward"] = _attention(device, attention, backward=True)
    return calls


def _noise(
    device: torch.device, dtype: str, room: int, products: Sequence[ProductKey]
) -> torch.Tensor:
    """Normal random numbers for operands of all products of a type, `room` bytes if these fit.

    A GPU's products of equal numbers take less power, and therefore less time.
    """
    number: torch.dtype = getattr(torch, dtype)
    largest = max(m * k + k * n for _, m, n, k in products)
    draw = torch.Generator(device).manual_seed(0)
    count = max(room // number.itemsize, largest)
    return torch.randn(count, dtype=number, device=device, generator=draw)


def _product(memory: torch.Tensor, m: int, n: int, k: int) -> Callable[[], object]:
    """A product and the two of its backward pass in turn, on operands out of the caches.

    Each has the shape m, n, k; the backward ones read one operand transposed.
    """
    # As many copies as leave the caches before the first is read again.
    copies = max(1, min(memory.numel() // (m * k + k * n + m * n), MOST_COPIES))
    left = memory[: copies * m * k]
    right = memory[left.numel() : left.numel() + copies * k * n]
    a = left.view(copies, m, k)
    b = right.view(copies, k, n)
    # The same shapes with the other order in memory, as the backward pass reads them.
    at = left.view(copies, k, m).transpose(1, 2)
    bt = right.view(copies, n, k).transpose(1, 2)
    forms = itertools.cycle(
        [(x[i], y[i]) for i in range(copies) for x, y in ((a, bt), (a, b), (at, b))]
    )

    def run() -> torch.Tensor:
        x, y = next(forms)
        return x @ y

    return run


def copy_call(device: torch.device, nbytes: int) -> Callable[[], object]:
    """A copy of so many bytes to others."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def stream_call(device: torch.device, nbytes: int) -> tuple[int, Callable[[], object]]:
    """Addition, GELU and normalisation, forward and backward; also the bytes moved.

    nbytes: the size of a tensor.
    """
    width = 256
    x = torch.linspace(-2, 2, nbytes // 4, device=device).view(-1, width).requires_grad_()
    weight = torch.ones(width, device=device, requires_grad=True)

    def run() -> object:
        y = torch.nn.functional.gelu(x + x)
        z = torch.nn.functional.layer_norm(y, (width,), weight, weight)
        return torch.autograd.grad(z, x, z.detach())

    # Tensors that the addition, GELU and the normalisation read and write.
    forward = 3 + 2 + 2
    backward = 3 + 3 + 3
    return (forward + backward) * nbytes, run


def update_call(device: torch.device, sizes: Sequence[int]) -> tuple[int, Callable[[], object]]:
    """A step of AdamW, as torch takes it by default on this device; also the bytes moved."""
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return UPDATED_BYTES * sum(sizes), torch.optim.AdamW(parameters).step


def _attention(
    device: torch.device, shape: AttentionShape, *, backward: bool
) -> Callable[[], object]:
    """Causal attention in one kernel, of 16-bit numbers on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3)
    )

    def run() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), out.detach()) if backward else out

    return run


def chain_call(device: torch.device) -> Callable[[], object]:
    """`CHAIN` small operators one after another, forward and backward."""
    x = torch.ones(SMALL, device=device, requires_grad=True)

    def run() -> object:
        y = _product_chain(x, CHAIN // 2)
        return torch.autograd.grad(y, x, y.detach())

    return run


def _kernels(device: torch.device) -> Callable[[], object]:
    """`CHAIN` small kernels one after another."""
    x = torch.ones(SMALL, device=device)
    return lambda: _product_chain(x, CHAIN)


def _product_chain(x: torch.Tensor, length: int) -> torch.Tensor:
    # Every operator waits for the one before it, so the time is that of starting them.
    y = x
    for _ in range(length):
        y = y * x
    return y
