"""Resampling of images and the Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .symbols import Symbol
from .trace import Asked


def _coordinates(
    size: int, out: int, scale: float, mode: str, region: tuple[float, float]
) -> np.ndarray:
    """For every place of the result the place in the source that it looks at."""
    place = np.arange(out, dtype=np.float64)
    if mode == "asymmetric":
        return place / scale
    if mode == "align_corners":
        return place * ((size - 1) / (scale * size - 1)) if scale * size != 1 else place * 0
    if mode == "tf_crop_and_resize":
        start, end = region
        step = (end - start) * (size - 1)
        return start * (size - 1) + (place * (step / (out - 1)) if out > 1 else place + 0.5 * step)
    if mode == "pytorch_half_pixel" and out == 1:
        return place * 0 - 0.5
    if mode == "half_pixel_symmetric":
        centre = size / 2 * (1 - out / (scale * size))
        return centre + (place + 0.5) / scale - 0.5
    return (place + 0.5) / scale - 0.5


def _nearest(x: np.ndarray, rounding: str) -> np.ndarray:
    """Round places to pixels; the two "round" modes differ in ties alone."""
    if rounding in ("floor", "ceil"):
        rounded: np.ndarray = np.floor(x) if rounding == "floor" else np.ceil(x)
    else:
        down = rounding == "round_prefer_floor"
        rounded = np.ceil(x - 0.5) if down else np.floor(x + 0.5)
    return rounded


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """The convolution kernel of cubic interpolation with parameter `a` (Keys 1981)."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _weights(
    place: np.ndarray,
    size: int,
    scale: float,
    *,
    cubic: bool,
    antialias: int,
    exclude: int,
    a: float,
) -> np.ndarray:
    """A matrix (size, out) that interpolates along one dim."""
    # Where the image shrinks, an antialiased kernel is as wide as the step between its places.
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = (2 if cubic else 1) / shrink
    low = math.floor(place.min(initial=0) - reach)
    high = math.ceil(place.max(initial=0) + reach)
    taps = np.arange(low, high + 1)
    distance = (place[:, None] - taps) * shrink
    weight = _cubic(distance, a) if cubic else (1 - np.abs(distance)).clip(0)
    # Without the taps outside, the others are scaled to a sum of one.
    if exclude:
        weight = weight * ((taps >= 0) & (taps < size))
    weight = weight / weight.sum(1, keepdims=True)
    matrix = np.zeros((size, len(place)))
    # Taps beyond the ends read the pixel at the end.
    np.add.at(matrix, taps.clip(0, size - 1), weight.T)
    return matrix


def upsample(
    asked: Asked, *, X: Symbol, scales: Sequence[float], mode: str = "nearest", **_: object
) -> Symbol:
    """An image resampled by factors, as before opset 11."""
    old: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resized(X, asked.shape, scales, mode=mode, **old)


def resize(
    asked: Asked,
    *,
    X: Symbol,
    scales: Sequence[float] = (),
    sizes: Sequence[int] = (),
    roi: Sequence[float] = (),
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    **options: Any,
) -> Symbol:
    """An image resampled to other sizes."""
    if asked.version < 11:
        return upsample(asked, X=X, scales=scales, **options)
    axes = range(X.rank) if axes is None else [axis % X.rank for axis in axes]
    regions = {axis: (roi[i], roi[len(axes) + i]) for i, axis in enumerate(axes)} if roi else {}
    if keep_aspect_ratio_policy != "stretch" and sizes:
        wanted = {axis: sizes[i] / X.shape[axis] for i, axis in enumerate(axes)}
        scale = (min if keep_aspect_ratio_policy == "not_larger" else max)(wanted.values())
        scales = [scale] * len(axes)
    given = dict(zip(axes, scales, strict=False))
    factors = [
        given.get(axis, out / n)
        for axis, (n, out) in enumerate(zip(X.shape, asked.shape, strict=True))
    ]
    return _resized(X, asked.shape, factors, regions=regions, **options)


def _resized(
    X: Symbol,
    sizes: Sequence[int],
    scales: Sequence[float],
    *,
    regions: Mapping[int, tuple[float, float]] | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    antialias: int = 0,
) -> Symbol:
    """An image resampled, one dim after another; `regions`: the part of each dim that is shown."""
    rank = X.rank
    # Places beyond the region get a value of their own; other modes repeat the edge.
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    outside = np.zeros((1,) * rank, np.bool_)
    y = X if X.floating or mode == "nearest" else X.to("float32")
    for axis, (size, out) in enumerate(zip(X.shape, sizes, strict=True)):
        # A dim that stays as it is needs no matrix.
        if size == out and scales[axis] == 1.0 and not cropped:
            continue
        region = (regions or {}).get(axis, (0.0, 1.0))
        place = _coordinates(size, out, scales[axis], coordinate_transformation_mode, region)
        if cropped:
            beyond = (place < 0) | (place > size - 1)
            outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(rank)])
        if mode == "nearest":
            y = y.picked(axis, _nearest(place, nearest_mode).clip(0, size - 1))
            continue
        matrix = _weights(
            place,
            size,
            scales[axis],
            cubic=mode == "cubic",
            antialias=antialias,
            exclude=exclude_outside,
            a=cubic_coeff_a,
        )
        weights = y.constant(matrix.astype(np.float32)).to(y.dtype)
        y = (y.transpose(axis, -1) @ weights).transpose(axis, -1)
    if outside.any():
        y = y.masked_fill(y.constant(outside), extrapolation_value)
    return y.to(X.dtype)


def affine_grid(*, theta: Symbol, size: tuple[int, ...], align_corners: int = 0) -> Symbol:
    """The places to which an affine map sends the points of a grid."""
    shape = (theta.shape[0], *size[2:], len(size) - 2)
    given = {"theta": theta, "size": size, "align_corners": bool(align_corners)}
    return theta.new("affine_grid_generator.default", shape, **given)


def grid_sample(
    *,
    X: Symbol,
    grid: Symbol,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: int = 0,
) -> Symbol:
    """The values of an image at the places of a grid."""
    modes = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
    return X.new(
        "grid_sampler.default",
        (*X.shape[:2], *grid.shape[1:-1]),
        input=X,
        grid=grid,
        interpolation_mode=modes[mode],
        padding_mode=("zeros", "border", "reflection").index(padding_mode),
        align_corners=bool(align_corners),
    )


def _as_numbers(values: Symbol) -> Symbol:
    """Complex numbers as pairs of real ones in a new innermost dim."""
    dtype = "float64" if values.dtype == "complex128" else "float32"
    return values.new("view_as_real.default", (*values.shape, 2), dtype, self=values)


def discrete_fourier(
    *,
    input: Symbol,
    axis: int = -2,
    dft_length: int | None = None,
    inverse: int = 0,
    onesided: int = 0,
) -> Symbol:
    """The discrete Fourier transform along a dim.

    The innermost dim of complex numbers holds the real and the imaginary part.
    """
    axis %= input.rank
    size = input.shape[axis] if dft_length is None else dft_length
    half = size // 2 + 1
    dtype = "complex128" if input.dtype == "float64" else "complex64"

    def transform(name: str, x: Symbol, length: int, result: str) -> Symbol:
        shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
        return x.new(f"fft_{name}.default", shape, result, self=x, n=size, dim=axis)

    if input.shape[-1] == 1:
        values = input.squeeze(-1)
        if onesided:
            return _as_numbers(transform("rfft", values, half, dtype))
        values = values.to(dtype)
    else:
        real, imaginary = (input.select(-1, part) for part in (0, 1))
        values = real.new("complex.default", None, dtype, real=real, imag=imaginary)
    if inverse and onesided:
        size = 2 * (input.shape[axis] - 1) if dft_length is None else dft_length
        return transform("irfft", values, size, input.dtype).unsqueeze(-1)
    return _as_numbers(transform("ifft" if inverse else "fft", values, size, dtype))


def short_time_fourier(
    *,
    signal: Symbol,
    frame_step: int,
    window: Symbol | None = None,
    frame_length: int | None = None,
    onesided: int = 1,
) -> Symbol:
    """The Fourier transform of every frame of a signal.

    The dims of the result are batch, frames, frequencies, and the real and the imaginary part.
    """
    signal = signal if signal.rank == 3 else signal.unsqueeze(-1)
    size = frame_length or (signal.shape[1] if window is None else window.shape[0])
    frames = signal.unfold(1, size, frame_step).transpose(2, 3)
    frames = frames if window is None else frames * window.unsqueeze(-1)
    return discrete_fourier(input=frames, axis=2, onesided=onesided)


FUNCTIONS: Mapping[str, Callable[..., Symbol]] = {
    "AffineGrid": affine_grid,
    "GridSample": grid_sample,
    "DFT": discrete_fourier,
    "STFT": short_time_fourier,
}
ASKING: Mapping[str, Callable[..., Symbol]] = {"Resize": resize, "Upsample": upsample}
