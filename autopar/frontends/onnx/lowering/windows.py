"""Convolutions, pools and other operators over neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import ModelError

from .elementwise import limits, truncated
from .normalization import per_channel
from .symbols import Symbol
from .trace import Asked

Sizes = tuple[int, ...]


class Windows:
    """The windows of a node: sizes, steps and padding of every spatial dim."""

    def __init__(
        self,
        X: Symbol,
        kernel: Sizes,
        *,
        strides: Sizes | None = None,
        dilations: Sizes | None = None,
        pads: Sizes | None = None,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        **_: object,
    ) -> None:
        count = X.rank - 2
        if count not in (1, 2, 3):
            raise ModelError(f"a window over {count} dims is not supported, only over 1, 2 or 3")
        self.sizes = X.shape[2:]
        self.kernel = kernel
        self.strides = strides or (1,) * count
        self.dilations = dilations or (1,) * count
        if not count == len(kernel) == len(self.strides) == len(self.dilations):
            raise ModelError(
                f"kernel {kernel}, strides {self.strides} and dilations {self.dilations} do not "
                f"fit {X.shape}"
            )
        self.spans = [d * (k - 1) + 1 for d, k in zip(self.dilations, kernel, strict=True)]
        needed = [
            max(0, (math.ceil(n / s) - 1) * s + span - n)
            for n, s, span in zip(self.sizes, self.strides, self.spans, strict=True)
        ]
        self.before, self.written = padding(pads, auto_pad, needed)
        self.out = tuple(self._count(i, ceil_mode) for i in range(count))
        self.after = tuple(
            (self.out[i] - 1) * self.strides[i] + self.spans[i] - self.sizes[i] - self.before[i]
            for i in range(count)
        )
        """The padding with which a pool without a ceiling gives every window."""

    def _count(self, i: int, ceil_mode: int) -> int:
        """The number of windows along one dim."""
        room = self.sizes[i] + self.before[i] + self.written[i] - self.spans[i]
        stride = self.strides[i]
        steps = math.ceil(room / stride) if ceil_mode else room // stride
        # A last window that would begin in the padding at the end does not count.
        if ceil_mode and steps * stride >= self.sizes[i] + self.before[i]:
            steps -= 1
        return steps + 1

    @property
    def plain(self) -> bool:
        """Whether torch's own padding, alike at both ends, gives these windows."""
        rows = zip(self.sizes, self.before, self.kernel, self.strides, self.spans, strict=True)
        made = [((n + 2 * p - span) // s + 1, 2 * p <= k) for n, p, k, s, span in rows]
        return all(fits for _, fits in made) and tuple(count for count, _ in made) == self.out

    def padded(self, x: Symbol, value: float = 0.0) -> Symbol:
        """The image with the padding written out."""
        return x.pad(self.before, self.after, value)

    def sums(self, x: Symbol) -> Symbol:
        """The sum of every window of a padded image, channel by channel."""
        # Each channel is a sample of its own: one kernel of ones serves all.
        n, c = x.shape[:2]
        ones = x.constant(np.ones((1, 1, *self.kernel), np.float32)).to(x.dtype)
        image = x.reshape(n * c, 1, *x.shape[2:])
        y = convolution(X=image, W=ones, strides=self.strides, dilations=self.dilations)
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


def padding(pads: Sizes | None, auto_pad: str, needed: Sequence[int]) -> tuple[Sizes, Sizes]:
    """Padding before and after every spatial dim: ONNX lists all starts, then all ends.

    `needed`: the padding of both ends together under SAME.
    """
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        small = tuple(n // 2 for n in needed)
        large = tuple(n - n // 2 for n in needed)
        return (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    count = len(needed)
    written = (0,) * (2 * count) if pads is None or auto_pad == "VALID" else pads
    return tuple(written[:count]), tuple(written[count:])


def convolution(
    *, X: Symbol, W: Symbol, B: Symbol | None = None, group: int = 1, **options: Any
) -> Symbol:
    """A convolution over one, two or three spatial dims."""
    w = Windows(X, W.shape[2:], **options)
    alike = w.before == w.written
    # Torch's convolutions pad both ends alike.
    image = X if alike else X.pad(w.before, w.written)
    return X.new(
        f"conv{len(w.kernel)}d.default",
        (X.shape[0], W.shape[0], *w.out),
        input=image,
        weight=W,
        bias=B,
        stride=w.strides,
        padding=w.before if alike else (0,) * len(w.kernel),
        dilation=w.dilations,
        groups=group,
    )


def transposed_convolution(
    *,
    X: Symbol,
    W: Symbol,
    B: Symbol | None = None,
    group: int = 1,
    output_padding: Sizes | None = None,
    output_shape: Sizes | None = None,
    pads: Sizes | None = None,
    auto_pad: str = "NOTSET",
    **options: Any,
) -> Symbol:
    """The gradient of a convolution with respect to its input."""
    w = Windows(X, W.shape[2:], **options)
    count = len(w.kernel)
    extra = output_padding or (0,) * count
    steps = list(zip(w.sizes, w.strides, w.spans, extra, strict=True))
    full = [(n - 1) * s + span + e for n, s, span, e in steps]
    wanted = output_shape or tuple(n * s for n, s, _, _ in steps)
    if output_shape is not None and auto_pad in ("NOTSET", "VALID"):
        auto_pad = "SAME_LOWER"
    needed = [f - n for f, n in zip(full, wanted, strict=True)]
    before, after = padding(pads, auto_pad, needed)
    # Torch crops both ends alike, too: else the whole result is computed, then cut.
    reach = zip(extra, w.strides, w.dilations, strict=True)
    alike = before == after and all(e < max(s, d) for e, s, d in reach)
    cut, grown = (before, extra) if alike else ((0,) * count, (0,) * count)
    rows = zip(steps, cut, grown, strict=True)
    sizes = [(n - 1) * s + span + g - 2 * p for (n, s, span, _), p, g in rows]
    y = X.new(
        f"conv_transpose{count}d.{'default' if count == 1 else 'input'}",
        (X.shape[0], W.shape[1] * group, *sizes),
        input=X,
        weight=W,
        bias=B if alike else None,
        stride=w.strides,
        padding=cut,
        output_padding=grown,
        groups=group,
        dilation=w.dilations,
    )
    if alike:
        return y
    y = y.pad([-b for b in before], [e - a for e, a in zip(extra, after, strict=True)])
    return y if B is None else y + per_channel(B, y)


def max_pool(
    asked: Asked, *, X: Symbol, kernel_shape: Sizes, storage_order: int = 0, **options: Any
) -> Symbol | tuple[Symbol, ...]:
    """The largest value of every window, and its place where that is asked for."""
    w = Windows(X, kernel_shape, **options)
    # Torch pools floats only; float64 holds the eight-bit integers that ONNX pools.
    x = X if X.floating else X.to("float64")
    placed = len(asked.outputs) > 1
    plain = w.plain and not placed
    name = f"max_pool{len(kernel_shape)}d"
    given = {
        "self": x if plain else w.padded(x, limits(x.dtype)[0]),
        "kernel_size": kernel_shape,
        "stride": w.strides,
        "padding": w.before if plain else (0,) * len(kernel_shape),
        "dilation": w.dilations,
    }
    shape = (*X.shape[:2], *w.out)
    if not placed:
        return x.new(f"{name}.default", shape, **given).to(X.dtype)
    results = [(shape, x.dtype), (shape, "int64")]
    y, places = x.several(f"{name}_with_indices.default", results, **given)
    return y.to(X.dtype), _global_places(places, w.padded(x), w, storage_order)


def _global_places(places: Symbol, padded: Symbol, pool: Windows, storage_order: int) -> Symbol:
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
    count_include_pad: int = 0,
    ceil_mode: int = 0,
    **options: Any,
) -> Symbol:
    """The mean of every window, with or without the padding."""
    w = Windows(X, kernel_shape, ceil_mode=ceil_mode, **options)
    if w.plain and not ceil_mode and set(w.dilations) == {1} and w.before == w.written:
        return X.new(
            f"avg_pool{len(kernel_shape)}d.default",
            (*X.shape[:2], *w.out),
            self=X,
            kernel_size=kernel_shape,
            stride=w.strides,
            padding=w.before,
            ceil_mode=False,
            count_include_pad=bool(count_include_pad),
        )
    members = w.members(count_include_pad).astype(np.float32)
    return w.sums(w.padded(X)) / X.constant(members).to(X.dtype)


def lp_pool(*, X: Symbol, kernel_shape: Sizes, p: int = 2, **options: Any) -> Symbol:
    """The p-norm of every window."""
    w = Windows(X, kernel_shape, **options)
    return w.sums(w.padded(X.map("abs") ** p)) ** (1 / p)


def max_unpool(
    asked: Asked,
    *,
    X: Symbol,
    I: Symbol,  # noqa: E741 - the name that ONNX gives it
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    output_shape: Sizes | None = None,
) -> Symbol:
    """Values back at the places that a max pool took them from; zeros elsewhere."""
    count = len(kernel_shape)
    before, after = padding(pads, "NOTSET", (0,) * count)
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
    grown = [o - n for o, n in zip(asked.shape[2:], sizes, strict=True)]
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
    before, after = padding(pads, "NOTSET", image_shape)
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
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalAveragePool": lambda *, X: X.mean(*range(2, X.rank), keep=True),
    "GlobalMaxPool": lambda *, X: X.amax(*range(2, X.rank), keep=True),
    "GlobalLpPool": lambda *, X, p=2: (
        (X.map("abs") ** p).sum(*range(2, X.rank), keep=True) ** (1 / p)
    ),
    "Col2Im": columns_to_image,
}
ASKING: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
}
