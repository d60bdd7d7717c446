"""Resampling of images and the Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _coordinates(
    size: int, out: int, scale: float, mode: str, roi: tuple[float, float], like: Tensor
) -> Tensor:
    """For every place of the result the place in the source that it looks at."""
    place = torch.arange(
        out, dtype=like.dtype if like.is_floating_point() else torch.float32, device=like.device
    )
    if mode == "asymmetric":
        return place / scale
    if mode == "align_corners":
        return place * ((size - 1) / (scale * size - 1)) if scale * size != 1 else place * 0
    if mode == "tf_crop_and_resize":
        start, end = roi
        step = (end - start) * (size - 1)
        return start * (size - 1) + (place * (step / (out - 1)) if out > 1 else place + 0.5 * step)
    if mode == "pytorch_half_pixel" and out == 1:
        return place * 0 - 0.5
    if mode == "half_pixel_symmetric":
        centre = size / 2 * (1 - out / (scale * size))
        return centre + (place + 0.5) / scale - 0.5
    return (place + 0.5) / scale - 0.5


def _nearest(x: Tensor, rounding: str) -> Tensor:
    """Round places to pixels; the two "round" modes differ in ties alone."""
    if rounding == "floor":
        return torch.floor(x)
    if rounding == "ceil":
        return torch.ceil(x)
    return torch.ceil(x - 0.5) if rounding == "round_prefer_floor" else torch.floor(x + 0.5)


def _cubic(distance: Tensor, a: float) -> Tensor:
    """The convolution kernel of cubic interpolation with parameter `a` (Keys 1981)."""
    d = distance.abs()
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    outer = torch.where(d < 2, far, torch.zeros_like(d))
    return torch.where(d <= 1, near, outer)


def _weights(
    place: Tensor, size: int, scale: float, *, mode: str, antialias: int, exclude: int, a: float
) -> Tensor:
    """A matrix (out, size) that interpolates along one dim."""
    # Where the image shrinks, an antialiased kernel is as wide as the step between its places.
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = (2 if mode == "cubic" else 1) / shrink
    low = math.floor(float(place.min()) - reach) if place.numel() else 0
    high = math.ceil(float(place.max()) + reach) if place.numel() else 0
    taps = torch.arange(low, high + 1, dtype=place.dtype, device=place.device)
    distance = (place.unsqueeze(1) - taps) * shrink
    weight = _cubic(distance, a) if mode == "cubic" else (1 - distance.abs()).clamp(min=0)
    # Without the taps outside, the others are scaled to a sum of one.
    if exclude:
        weight = weight * ((taps >= 0) & (taps < size))
    weight = weight / weight.sum(1, keepdim=True)
    matrix = torch.zeros(place.numel(), size, dtype=place.dtype, device=place.device)
    # Taps beyond the ends read the pixel at the end.
    return matrix.index_add(1, taps.clamp(0, size - 1).to(torch.int64), weight)


def resize(
    *,
    X: Tensor,
    scales: tuple[float, ...],
    sizes: tuple[int, ...],
    roi: tuple[float, ...] | None = None,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    antialias: int = 0,
) -> Tensor:
    """An image resampled to `sizes`, one dim after another."""
    rank = X.dim()
    # Places beyond the region get a value of their own; other modes repeat the edge.
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    outside: Tensor | None = None
    y = X if X.is_floating_point() or mode == "nearest" else X.to(torch.float32)
    for axis in range(rank):
        size = X.shape[axis]
        out = sizes[axis]
        # A dim that stays as it is needs no matrix.
        if size == out and scales[axis] == 1.0 and not cropped:
            continue
        region = (roi[axis], roi[rank + axis]) if roi else (0.0, 1.0)
        place = _coordinates(size, out, scales[axis], coordinate_transformation_mode, region, y)
        if cropped:
            out_here = ((place < 0) | (place > size - 1)).reshape(
                [-1 if i == axis else 1 for i in range(rank)]
            )
            outside = out_here if outside is None else outside | out_here
        if mode == "nearest":
            pixel = _nearest(place, nearest_mode).clamp(0, size - 1)
            y = y.index_select(axis, pixel.to(torch.int64))
            continue
        a = cubic_coeff_a
        matrix = _weights(
            place, size, scales[axis], mode=mode, antialias=antialias, exclude=exclude_outside, a=a
        )
        y = torch.movedim(torch.matmul(torch.movedim(y, axis, -1), matrix.t()), -1, axis)
    if outside is not None:
        y = torch.where(outside, torch.full_like(y, extrapolation_value), y)
    return y.to(X.dtype)


def affine_grid(*, theta: Tensor, size: tuple[int, ...], align_corners: int = 0) -> Tensor:
    """The places to which an affine map sends the points of a grid."""
    return F.affine_grid(theta, list(size), align_corners=bool(align_corners))


def grid_sample(
    *,
    X: Tensor,
    grid: Tensor,
    mode: str = "linear",
    padding_mode: str = "zeros",
    align_corners: int = 0,
) -> Tensor:
    """The values of an image at the places of a grid."""
    known = {"linear": "bilinear", "cubic": "bicubic"}
    return F.grid_sample(
        X,
        grid,
        mode=known.get(mode, mode),
        padding_mode=padding_mode,
        align_corners=bool(align_corners),
    )


def discrete_fourier(
    *,
    input: Tensor,
    axis: int = -2,
    dft_length: int | None = None,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    """The discrete Fourier transform along a dim.

    The innermost dim of complex numbers holds the real and the imaginary part.
    """
    axis %= input.dim()
    size = dft_length
    if input.shape[-1] == 1:
        values = input.squeeze(-1)
        if onesided:
            return torch.view_as_real(torch.fft.rfft(values, n=size, dim=axis))
        values = values.to(torch.complex128 if values.dtype == torch.float64 else torch.complex64)
    else:
        values = torch.view_as_complex(input.contiguous())
    if inverse and onesided:
        real: Tensor = torch.fft.irfft(values, n=size, dim=axis)
        return real.unsqueeze(-1)
    transform = torch.fft.ifft if inverse else torch.fft.fft
    return torch.view_as_real(transform(values, n=size, dim=axis))


def short_time_fourier(
    *,
    signal: Tensor,
    frame_step: int,
    window: Tensor | None = None,
    frame_length: int | None = None,
    onesided: int = 1,
) -> Tensor:
    """The Fourier transform of every frame of a signal.

    The dims of the result are batch, frames, frequencies, and the real and the imaginary part.
    """
    size = frame_length or (signal.shape[1] if window is None else window.shape[0])
    frames = signal.unfold(1, size, frame_step).transpose(2, 3)
    frames = frames if window is None else frames * window.unsqueeze(-1)
    return discrete_fourier(input=frames, axis=2, onesided=onesided)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "Resize": resize,
    "AffineGrid": affine_grid,
    "GridSample": grid_sample,
    "DFT": discrete_fourier,
    "STFT": short_time_fourier,
}
