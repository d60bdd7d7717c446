"""Rules of operators on images: pools with indices, resampling and the like; each channel of each
image on its own.
"""

from __future__ import annotations

from .registry import Call, register
from .selection import all_whole
from .spelling import by_name, whole


def _space(call: Call) -> int:
    """The number of spatial dims (the last ones), from the operator's name."""
    return next(int(d) for d in "123" if f"{d}d" in call.operator.kind)


def _pool(call: Call) -> str:
    """The outputs are values and, for some pools, the places that they came from."""
    # Places count from the corner of the whole image, so the space stays whole.
    image = call.inputs[0].shape
    space = _space(call)
    lead = " ".join(f"d{i}" for i in range(len(image) - space))
    ins = [f"{lead} {whole(t.shape[len(image) - space :], 'x')}" for t in call.inputs]
    return f"{', '.join(ins)} -> " + ", ".join(
        f"{lead} {whole(t.shape[len(image) - space :], 'y')}" for t in call.outputs
    )


def _fractional_pool(call: Call) -> str:
    """The windows of every channel of every image lie where its samples say."""
    image = call.inputs[0].shape
    space = _space(call)
    if len(image) != space + 2:
        return all_whole(call)
    lead = "n c"
    outs = [f"{lead} {whole(t.shape[2:], 'y')}" for t in call.outputs]
    return by_name(
        call, {"self": f"{lead} {whole(image[2:], 'x')}", "random_samples": f"{lead} !t"}, outs
    )


def _resample(call: Call) -> str:
    """The space is whole, except where nearest values are repeated 2^k times: that is exact, and
    the space is split.
    """
    before = call.inputs[0].shape[2:]
    after = call.outputs[0].shape[2:]
    times = [
        large // small if small and large % small == 0 else 0
        for small, large in zip(before, after, strict=True)
    ]
    repeated = "upsample_nearest" in call.operator.kind and all(
        t > 0 and t & (t - 1) == 0 for t in times
    )
    # Powers of two alone are exact: other factors have rounded scales, which lead to other places.
    if repeated and _plain_scale(call, times):
        outs = [f"(x{i} !r{i}={count})" if count > 1 else f"x{i}" for i, count in enumerate(times)]
        return f"n c {' '.join(f'x{i}' for i in range(len(before)))} -> n c {' '.join(outs)}"
    return f"n c {whole(before, 'x')} -> n c {whole(after, 'y')}"


def _plain_scale(call: Call, times: list[int]) -> bool:
    """Whether scales, where they are given, are the quotients of the sizes."""
    given = call.get("scale_factors")
    listed = (
        given
        if isinstance(given, tuple)
        else tuple(call.get(name) for name in ("scales", "scales_d", "scales_h", "scales_w"))
    )
    scales = [value for value in listed if value is not None]
    return not scales or scales == [float(count) for count in times]


_FORMS = ("vec", "default")
_NEAREST = [
    f"{name}{d}d.{form}"
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for d in (1, 2, 3)
    for form in _FORMS
]
_SMOOTH = [
    f"{name}.{form}"
    for name in (
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "upsample_trilinear3d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    )
    for form in _FORMS
]
register([f"aten.{name}" for name in (*_NEAREST, *_SMOOTH)], _resample, linear=((0,),), saves="")
register(
    """aten.max_pool1d_with_indices.default aten.max_pool2d_with_indices.default
    aten.max_pool3d_with_indices.default aten.adaptive_max_pool1d.default
    aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool3d.default aten.max_unpool2d.default
    aten.max_unpool3d.default""",
    _pool,
)
register("aten.fractional_max_pool2d.default aten.fractional_max_pool3d.default", _fractional_pool)
