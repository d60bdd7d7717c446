"""Rules of complex numbers, and of Fourier transforms, which need the dims that they transform
whole.
"""

from __future__ import annotations

from .elementwise import pointwise
from .registry import Call, register
from .shape import letters


def _transform(call: Call) -> str:
    """Transformed dims are whole: the dims in `dim`, else as many last dims as `s` has sizes, else
    all.
    """
    rank = len(call.inputs[0].shape)
    kind = call.operator.kind.split(".")[1]
    dim = call.get("dim")
    sizes = call.get("s")
    if isinstance(dim, (int, tuple)):
        dims = set(call.dims(rank, "dim")) if dim != () else set()
    elif kind.endswith("2"):
        dims = {rank - 2, rank - 1}
    elif not kind.endswith(("n", "shift")):
        dims = {rank - 1}
    # Every frequency reads all places of a transformed dim.
    else:
        dims = set(range(rank - len(sizes), rank)) if isinstance(sizes, tuple) else set(range(rank))
    names = letters(rank)
    before, after = (
        " ".join(f"!{mark}{i}" if i in dims else name for i, name in enumerate(names))
        for mark in ("x", "y")
    )
    return f"{before} -> {after}"


def _short_time(call: Call) -> str:
    """`stft` and `istft` transform each signal of the batch by itself."""
    # Frames overlap, and the ends are padded, so the time of a signal stays whole.
    batch = (
        ["n"]
        if len(call.inputs[0].shape) == (3 if call.operator.kind.startswith("aten.istft") else 2)
        else []
    )
    before = [*batch, *(f"!x{i}" for i in range(len(call.inputs[0].shape) - len(batch)))]
    after = [*batch, *(f"!y{i}" for i in range(len(call.outputs[0].shape) - len(batch)))]
    return (
        ", ".join([" ".join(before), *("!w" for _ in call.inputs[1:])]) + " -> " + " ".join(after)
    )


_TRANSFORMS = [
    f"{name}{dims}"
    for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    for dims in ("", "2", "n")
]
register([f"aten.fft_{name}.default" for name in _TRANSFORMS], _transform, linear=((0,),), saves="")
register(
    "aten.fft_fftshift.default aten.fft_ifftshift.default", _transform, linear=((0,),), saves=""
)
register(
    "aten._fft_c2c.default aten._fft_r2c.default aten._fft_c2r.default",
    _transform,
    linear=((0,),),
    saves="",
)
register("aten.stft.default aten.stft.center aten.istft.default", _short_time, linear=((0,),))
register("aten.view_as_complex.default", "* !z -> *", linear=((0,),), view=True)
register("aten.view_as_real.default", "* -> * !z", linear=((0,),), view=True)
register("aten.real.default aten.imag.default", pointwise, linear=((0,),), view=True)
# Jointly linear: a share of the real and a share of the imaginary part make a share of the number.
register("aten.complex.default", pointwise, linear=((0, 1),), saves="")
# No partial sum passes: the gradient that torch gives takes the length to be positive.
register("aten.polar.default", pointwise)
register("aten.angle.default", "* -> *")
