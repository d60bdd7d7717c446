"""Convolutions, pools and other operators over neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.errors import ModelError

from .elementwise import limits
from .normalization import per_channel
from .symbols import Symbol
from .unsigned import truncated

Sizes = tuple[int, ...]


def _spatial(pads: Sizes | None, count: int) -> tuple[Sizes, Sizes]:
    """Padding before and after every spatial dim: ONNX lists all starts, then all ends."""
    pads = pads or (0,) * (2 * count)
    return tuple(pads[:count]), tuple(pads[count:])


def _known_rank(x: Symbol) -> int:
    count = x.rank - 2
    if count not in (1, 2, 3):
        raise ModelError(f"a window over {count} dims is not supported, only over 1, 2 or 3")
    return count


def convolution(
    *,
    X: Symbol,
    W: Symbol,
    B: Symbol | None = None,
    group: int = 1,
    pads: Sizes | None = None,
    strides: Sizes | None = None,
    dilations: Sizes | None = None,
    kernel_shape: Sizes | None = None,
    auto_pad: str = "NOTSET",
) -> Symbol:
    """A convolution over one, two or three spatial dims."""
    count = _known_rank(X)
    before, after = _spatial(pads, count)
    padding = before
    if before != after:
        # Torch's convolutions pad both ends alike.
        X = X.pad(before, after)
        padding = (0,) * count
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(X.shape[2:], padding, dilations, W.shape[2:], strides, strict=True)
    ]
    return X.new(
        f"conv{count}d.default",
        (X.shape[0], W.shape[0], *sizes),
        input=X,
        weight=W,
        bias=B,
        stride=strides,
        padding=padding,
        dilation=dilations,
        groups=group,
    )


def transposed_convolution(
    *,
    X: Symbol,
    W: Symbol,
    B: Symbol | None = None,
    group: int = 1,
    pads: Sizes | None = None,
    strides: Sizes | None = None,
    dilations: Sizes | None = None,
    output_padding: Sizes | None = None,
    kernel_shape: Sizes | None = None,
    auto_pad: str = "NOTSET",
) -> Symbol:
    """The gradient of a convolution with respect to its input."""
    count = _known_rank(X)
    before, after = _spatial(pads, count)
    extra = output_padding or (0,) * count
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    # Torch crops both ends alike, too: else the whole result is computed, then cut.
    alike = before == after and all(
        e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)
    )
    padding = before if alike else (0,) * count
    inner = extra if alike else (0,) * count
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(
            X.shape[2:], strides, padding, dilations, W.shape[2:], inner, strict=True
        )
    ]
    y = X.new(
        f"conv_transpose{count}d.{'default' if count == 1 else 'input'}",
        (X.shape[0], W.shape[1] * group, *sizes),
        input=X,
        weight=W,
        bias=B if alike else None,
        stride=strides,
        padding=padding,
        output_padding=inner,
        groups=group,
        dilation=dilations,
    )
    if alike:
        return y
    grown = [e - a for e, a in zip(extra, after, strict=True)]
    y = y.pad([-b for b in before], grown)
    return y if B is None else y + per_channel(B, y)


class Pool:
    """The windows of a pool: their number, and the padding with which a floor pool gives all."""

    def __init__(
        self,
        X: Symbol,
        kernel: Sizes,
        strides: Sizes | None,
        pads: Sizes | None,
        dilations: Sizes | None,
        ceil_mode: int,
    ) -> None:
        count = _known_rank(X)
        self.kernel = kernel
        self.strides = strides or (1,) * count
        self.dilations = dilations or (1,) * count
        self.before, self.written = _spatial(pads, count)
        self.sizes = X.shape[2:]
        self.out = tuple(self._windows(i, ceil_mode) for i in range(count))
        self.after = tuple(self._reach(i) - self.sizes[i] - self.before[i] for i in range(count))

    def _span(self, i: int) -> int:
        return self.dilations[i] * (self.kernel[i] - 1) + 1

    def _windows(self, i: int, ceil_mode: int) -> int:
        """The number of windows along one dim."""
        span = self.sizes[i] + self.before[i] + self.written[i] - self._span(i)
        stride = self.strides[i]
        steps = math.ceil(span / stride) if ceil_mode else span // stride
        # A last window that would begin in the padding at the end does not count.
        if ceil_mode and steps * stride >= self.sizes[i] + self.before[i]:
            steps -= 1
        return steps + 1

    def _reach(self, i: int) -> int:
        return (self.out[i] - 1) * self.strides[i] + self._span(i)

    @property
    def plain(self) -> bool:
        """Whether torch's own padding, alike at both ends, gives these windows."""
        return all(
            2 * p <= k and (n + 2 * p - self._span(i)) // s + 1 == self.out[i]
            for i, (n, p, k, s) in enumerate(
                zip(self.sizes, self.before, self.kernel, self.strides, strict=True)
            )
        )

    def padded(self, x: Symbol, value: float = 0.0) -> Symbol:
        """The image with the padding written out."""
        return x.pad(self.before, self.after, value)

    def sums(self, x: Symbol) -> Symbol:
        """The sum of every window of a padded image, channel by channel."""
        # Each channel is a sample of its own: one kernel of ones serves all.
        n, c = x.shape[:2]
        ones = x.constant(np.ones((1, 1, *self.kernel), np.float32)).to(x.dtype)
        y = convolution(
            X=x.reshape(n * c, 1, *x.shape[2:]),
            W=ones,
            strides=self.strides,
            dilations=self.dilations,
        )
        return y.reshape(n, c, *y.shape[2:])

    def members(self, include_pad: int) -> np.ndarray:
        """How many places of each window count, which is the same for all samples and channels."""
        total = np.ones((1, 1, *[1] * len(self.kernel)))
        for i, out in enumerate(self.out):
            starts = np.arange(out)[:, None] * self.strides[i] - self.before[i]
            places = starts + np.arange(self.kernel[i]) * self.dilations[i]
            # Written padding counts as members of a window; what a ceiled window reaches beyond
            # does not.
            low = -self.before[i] if include_pad else 0
            high = self.sizes[i] + (self.written[i] if include_pad else 0)
            inside = ((places >= low) & (places < high)).sum(1)
            total = total * inside.reshape([-1 if dim == i + 2 else 1 for dim in range(total.ndim)])
        return total


def max_pool(
    *,
    X: Symbol,
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    storage_order: int | None = None,
    auto_pad: str = "NOTSET",
) -> Symbol | tuple[Symbol, ...]:
    """The largest value of every window, and with `storage_order` its place."""
    pool = Pool(X, kernel_shape, strides, pads, dilations, ceil_mode)
    # Torch pools floats only; float64 holds the eight-bit integers that ONNX pools.
    x = X if X.floating else X.to("float64")
    padding = pool.before
    if not pool.plain or storage_order is not None:
        x = pool.padded(x, limits(x.dtype)[0])
        padding = (0,) * len(kernel_shape)
    name = f"max_pool{len(kernel_shape)}d"
    given = {
        "kernel_size": kernel_shape,
        "stride": pool.strides,
        "padding": padding,
        "dilation": pool.dilations,
    }
    shape = (*X.shape[:2], *pool.out)
    if storage_order is None:
        return x.new(f"{name}.default", shape, self=x, **given).to(X.dtype)
    results = [(shape, x.dtype), (shape, "int64")]
    y, places = x.several(f"{name}_with_indices.default", results, self=x, **given)
    return y.to(X.dtype), _global_places(places, x, pool, storage_order)


def _global_places(places: Symbol, padded: Symbol, pool: Pool, storage_order: int) -> Symbol:
    """Places in a padded plane as places in the whole tensor, as ONNX counts them."""
    coordinates = []
    for size, front in reversed(list(zip(padded.shape[2:], pool.before, strict=True))):
        coordinates.append(places.with_other("remainder.Scalar", size) - front)
        places = truncated(places, size)
    coordinates.reverse()
    axes = list(range(len(pool.sizes)))
    # In column-major order (`storage_order` 1) the first dim runs fastest, else the last one.
    first, *rest = reversed(axes) if storage_order else axes
    flat = coordinates[first]
    for axis in rest:
        flat = flat * pool.sizes[axis] + coordinates[axis]
    # Torch counts places in each plane, ONNX over all samples and channels.
    planes = np.arange(math.prod(padded.shape[:2])).reshape(*padded.shape[:2], *[1] * len(axes))
    return flat + flat.constant(planes * math.prod(pool.sizes))


def average_pool(
    *,
    X: Symbol,
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: str = "NOTSET",
) -> Symbol:
    """The mean of every window, with or without the padding."""
    pool = Pool(X, kernel_shape, strides, pads, dilations, ceil_mode)
    if pool.plain and not ceil_mode and set(pool.dilations) == {1} and pool.before == pool.written:
        return X.new(
            f"avg_pool{len(kernel_shape)}d.default",
            (*X.shape[:2], *pool.out),
            self=X,
            kernel_size=kernel_shape,
            stride=pool.strides,
            padding=pool.before,
            ceil_mode=False,
            count_include_pad=bool(count_include_pad),
        )
    members = pool.members(count_include_pad).astype(np.float32)
    return pool.sums(pool.padded(X)) / X.constant(members).to(X.dtype)


def lp_pool(
    *,
    X: Symbol,
    kernel_shape: Sizes,
    p: int = 2,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    auto_pad: str = "NOTSET",
) -> Symbol:
    """The p-norm of every window."""
    pool = Pool(X, kernel_shape, strides, pads, dilations, ceil_mode)
    return pool.sums(pool.padded(X.map("abs") ** p)) ** (1 / p)


def global_average_pool(*, X: Symbol) -> Symbol:
    """The mean over all spatial dims."""
    return X.mean(*range(2, X.rank), keep=True)


def global_max_pool(*, X: Symbol) -> Symbol:
    """The maximum over all spatial dims."""
    return X.amax(*range(2, X.rank), keep=True)


def global_lp_pool(*, X: Symbol, p: int = 2) -> Symbol:
    """The p-norm over all spatial dims."""
    return (X.map("abs") ** p).sum(*range(2, X.rank), keep=True) ** (1 / p)


def max_unpool(
    *,
    X: Symbol,
    I: Symbol,  # noqa: E741 - the name that ONNX gives it
    kernel_shape: Sizes,
    output_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
) -> Symbol:
    """Values back at the places that a max pool took them from; zeros elsewhere."""
    count = len(kernel_shape)
    before, after = _spatial(pads, count)
    steps = strides or (1,) * count
    sizes = [
        (n - 1) * s + k - b - a
        for n, s, k, b, a in zip(X.shape[2:], steps, kernel_shape, before, after, strict=True)
    ]
    plane = math.prod(sizes)
    # ONNX counts places over the whole tensor; every value stays in its own plane.
    places = I.with_other("remainder.Scalar", plane).reshape(*X.shape[:2], -1)
    values = X.reshape(*X.shape[:2], -1)
    zeros = X.constant(np.zeros((1, 1, 1), np.float32)).to(X.dtype).expand(*X.shape[:2], plane)
    flat = zeros.scatter(2, places, values)
    grown = [o - n for o, n in zip(output_shape[2:], sizes, strict=True)]
    return flat.reshape(*X.shape[:2], *sizes).pad((0,) * count, grown)


def columns_to_image(
    *,
    input: Symbol,
    image_shape: Sizes,
    block_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
) -> Symbol:
    """Sum overlapping blocks into an image."""
    count = len(image_shape)
    before, after = _spatial(pads, count)
    padded = tuple(b + n + a for b, n, a in zip(before, image_shape, after, strict=True))
    # Flat places of (tap, block), grown by one spatial dim at a time.
    place = np.zeros((1, 1), np.int64)
    for n, k, s, d in zip(
        padded, block_shape, strides or (1,) * count, dilations or (1,) * count, strict=True
    ):
        grid = np.arange(0, d * k, d)[:, None] + np.arange(0, n - d * (k - 1), s)
        place = (place[:, None, :, None] * n + grid[None, :, None, :]).reshape(len(place) * k, -1)
    channels = input.shape[1] // math.prod(block_shape)
    values = input.reshape(input.shape[0], channels, -1)
    zeros = input.constant(np.zeros((1, 1, 1), np.float32)).to(input.dtype)
    flat = zeros.expand(*values.shape[:2], math.prod(padded))
    index = input.constant(place.reshape(-1))
    image = flat.new("index_add.default", self=flat, dim=2, index=index, source=values)
    image = image.reshape(*values.shape[:2], *padded)
    return image.pad([-b for b in before], [-a for a in after])


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalLpPool": global_lp_pool,
    "MaxUnpool": max_unpool,
    "Col2Im": columns_to_image,
}
