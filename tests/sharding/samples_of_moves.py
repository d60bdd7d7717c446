"""Sample calls of functions point by point, of reads and writes at places, and of operators that
rearrange.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import bools, f, ints, n, names
from tests.sharding.values import by_order, z

_OF_TWO = """copysign.Tensor hypot.default fmax.default fmin.default max.other min.other
    logaddexp.default logaddexp2.default xlogy.Tensor special_xlog1py.default
    float_power.Tensor_Tensor arctan2.default ldexp.Tensor true_divide.Tensor divide.Tensor
    subtract.Tensor multiply.Tensor fmod.Tensor nextafter.default heaviside.default
    isclose.default clamp_min.Tensor clamp_max.Tensor clip.Tensor _prelu_kernel.default"""
_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
_WITH_NUMBER = """copysign.Scalar xlogy.Scalar_Other float_power.Tensor_Scalar multiply.Scalar
    divide.Scalar true_divide.Scalar subtract.Scalar fill.Scalar"""


def points() -> Iterator[Sample]:
    """More functions of one or two tensors, point by point."""
    for name in (
        "positive",
        "negative",
        "deg2rad",
        "rad2deg",
        "conj_physical",
        "_conj_physical",
        "resolve_neg",
        "_neg_view",
        "lift_fresh",
    ):
        yield sample(f"aten.{name}.default", self=n(6, 12))
    for name in ("_conj", "conj_physical", "sgn", "abs"):
        yield sample(f"aten.{name}.default", "complex", self=z(6, 12))
    for name in ("mul", "add", "div"):
        yield sample(f"aten.{name}.Tensor", "complex", self=z(6, 12), other=z(12))
    for name in _OF_TWO.split():
        for left, right in (((6, 12), (6, 12)), ((6, 12), (12,)), ((6, 6), ())):
            if "prelu" not in name or right == (12,):
                yield by_order(f"aten.{name}", "", f(*left), f(*right))
    for name in _WITH_NUMBER.split():
        yield by_order(f"aten.{name}", "", n(6, 12).abs(), 1.5)
    for name in ("xlogy.Scalar_Self", "float_power.Scalar", "remainder.Scalar_Tensor"):
        yield by_order(f"aten.{name}", "", 1.5, f(6, 12))
    yield sample("aten.zero.default", self=n(6, 12))
    yield sample("aten.fill.Tensor", self=n(6, 12), value=n())
    yield sample("aten.copy.default", self=n(6, 12), src=n(12))
    yield sample("aten.copy.default", "all", self=n(6, 12), src=n(6, 12))
    yield sample("aten.polygamma.default", n=1, self=f(6, 12))
    yield sample("aten.round.decimals", self=n(6, 12), decimals=1)
    yield sample("aten.where.Scalar", condition=bools(6, 12), self=1.0, other=2.0)
    yield sample(
        "aten.threshold_backward.default", grad_output=n(6, 12), self=n(6, 12), threshold=0.1
    )
    yield sample("aten.divide.Tensor_mode", self=n(6, 12), other=f(12), rounding_mode="trunc")
    yield sample("aten.div.Scalar_mode", self=n(6, 12), other=0.3, rounding_mode="floor")
    yield sample("aten.floor_divide.Scalar", self=ints(6, 12, high=50), other=3)
    yield sample("aten.frexp.Tensor", self=n(6, 12))
    for name in ("gcd.default", "lcm.default", *(f"{shift}.Tensor" for shift in _SHIFTS)):
        yield by_order(f"aten.{name}", "", ints(6, 12), ints(12))
    for name in (
        "bitwise_left_shift.Tensor_Scalar",
        "bitwise_right_shift.Tensor_Scalar",
        "__lshift__.Scalar",
        "__rshift__.Scalar",
    ):
        yield by_order(f"aten.{name}", "", ints(6, 12), 2)
    for name in ("not_equal", "greater", "greater_equal", "less", "less_equal"):
        yield sample(f"aten.{name}.Tensor", self=ints(6, 6), other=ints(6))
        yield sample(f"aten.{name}.Scalar", self=ints(6, 6), other=3)
    for shape, slopes in (
        ((6, 6, 2), (6,)),
        ((6, 6, 2), (1,)),
        ((6,), (1,)),
        ((6, 12), (12,)),
        ((6, 12), ()),
    ):
        yield sample("aten.prelu.default", f"{shape} {slopes}", self=n(*shape), weight=n(*slopes))
    for dim in (0, -1):
        yield sample("aten.glu.default", f"{dim}", self=n(12, 12), dim=dim)


def places() -> Iterator[Sample]:
    """Reads and writes at given places."""
    for dim in (0, 1, -1):
        yield sample("aten.gather.default", f"{dim}", self=n(6, 6, 6), dim=dim, index=ints(6, 6, 6))
        yield sample(
            "aten.index_select.default", f"{dim}", self=n(6, 12, 6), dim=dim, index=ints(6)
        )
        yield sample(
            "aten.take_along_dim.default", f"{dim}", self=n(6, 6, 6), indices=ints(6, 6, 6), dim=dim
        )
    yield sample(
        "aten.gather.default", "in part", self=n(6, 6, 12), dim=2, index=ints(4, 6, 6, high=12)
    )
    yield sample("aten.gather.default", "of integers", self=ints(6, 12), dim=1, index=ints(6, 6))
    yield sample("aten.gather.default", "of a number", self=n(), dim=0, index=ints(high=1))
    yield sample("aten.index_select.default", "of integers", self=ints(6, 12), dim=1, index=ints(6))
    yield sample(
        "aten.take_along_dim.default", "broadcast", self=n(6, 1, 6), indices=ints(1, 6, 6), dim=2
    )
    yield sample("aten.take_along_dim.default", "flat", self=n(6, 6), indices=ints(6))
    for kind in ("aten.index.Tensor", "aten._unsafe_index.Tensor"):
        yield sample(kind, "first", self=n(6, 6, 12), indices=[ints(6)])
        yield sample(kind, "matrix", self=n(6, 6, 12), indices=[None, ints(6, 2) - 3])
        yield sample(kind, "last", self=n(6, 6, 12), indices=[None, None, ints(12, high=12)])
        yield sample(kind, "two", self=n(6, 6, 12), indices=[ints(6, 1), ints(12)])
        yield sample(kind, "two behind", self=n(12, 6, 6), indices=[None, ints(6, 1), ints(12)])
        yield sample(kind, "apart", self=n(6, 12, 6), indices=[ints(6), None, ints(6)])
        yield sample(kind, "of integers", self=ints(6, 12), indices=[ints(6)])
        yield sample(kind, "number", self=n(6, 12), indices=[ints()])
    for kind in (
        "aten.index_put.default",
        "aten._unsafe_index_put.default",
        "aten._index_put_impl.default",
    ):
        place = torch.tensor([5, 1, 3, 0, 2, 4])
        for added in (False, True):
            yield sample(
                kind, f"{added}", self=n(12, 6), indices=[place], values=n(6, 6), accumulate=added
            )
            yield sample(
                kind,
                f"behind {added}",
                self=n(6, 12, 2),
                indices=[None, place - 6],
                values=n(6, 6, 2),
                accumulate=added,
            )
            yield sample(
                kind,
                f"broadcast {added}",
                self=n(6, 12),
                indices=[None, place],
                values=n(6),
                accumulate=added,
            )
            yield sample(
                kind,
                f"number {added}",
                self=n(6, 12),
                indices=[None, place],
                values=n(),
                accumulate=added,
            )
            yield sample(
                kind,
                f"two {added}",
                self=n(6, 12, 6),
                indices=[place, place],
                values=n(6, 6),
                accumulate=added,
            )
            yield sample(
                kind,
                f"integers {added}",
                self=ints(6, 12),
                indices=[None, place],
                values=ints(6),
                accumulate=added,
            )
        yield sample(
            kind,
            "repeated",
            self=n(6, 12),
            indices=[None, ints(6)],
            values=n(6, 6),
            accumulate=True,
        )
        if kind != "aten._unsafe_index_put.default":
            yield sample(
                kind, "mask", self=n(6, 12, 2), indices=[bools(6, 12)], values=n(), accumulate=False
            )
            yield sample(
                kind,
                "mask of rows",
                self=n(6, 6),
                indices=[torch.arange(6) % 2 == 0],
                values=n(3, 6),
                accumulate=False,
            )
    for dim in (0, -1):
        order = torch.argsort(f(6, 6), dim)
        for kind in ("scatter.src", "scatter_add.default"):
            yield sample(f"aten.{kind}", f"{dim}", self=n(6, 6), dim=dim, index=order, src=n(6, 6))
        yield sample("aten.scatter.value", f"{dim}", self=n(6, 6), dim=dim, index=order, value=0.5)
        yield sample(
            "aten.scatter.value_reduce",
            f"{dim}",
            self=ints(6, 6),
            dim=dim,
            index=order,
            value=3,
            reduce="add",
        )
        yield sample(
            "aten.scatter.reduce",
            f"{dim}",
            self=ints(6, 6),
            dim=dim,
            index=order,
            src=ints(6, 6),
            reduce="multiply",
        )
        for how in ("sum", "mean", "amax", "prod"):
            for own in (False, True):
                given = {"index": ints(6, 6), "src": f(6, 6), "reduce": how, "include_self": own}
                yield sample(
                    "aten.scatter_reduce.two", f"{how} {dim} {own}", self=f(6, 6), dim=dim, **given
                )
    yield sample(
        "aten.scatter_add.default", "repeated", self=n(6, 12), dim=1, index=ints(6, 6), src=n(6, 6)
    )
    yield sample(
        "aten.scatter_add.default", "in part", self=n(6, 12), dim=1, index=ints(4, 6), src=n(4, 6)
    )
    yield sample(
        "aten.scatter_add.default",
        "integers",
        self=ints(6, 12),
        dim=1,
        index=ints(6, 6),
        src=ints(6, 6),
    )
    yield sample(
        "aten.scatter.src",
        "in part",
        self=n(6, 12),
        dim=1,
        index=torch.arange(6).repeat(4, 1),
        src=n(4, 6),
    )
    yield sample(
        "aten.scatter.src",
        "in part of integers",
        self=ints(6, 12),
        dim=1,
        index=torch.arange(6).repeat(4, 1),
        src=ints(6, 12),
    )
    for dim in (0, -1):
        place = torch.tensor([5, 1, 3, 0, 2, 4])
        for name, index in (("index_add", ints(12)), ("index_copy", place)):
            rows = [6, 6]
            rows[dim] = len(index)
            given = {"self": n(6, 6), "dim": dim, "index": index, "source": n(*rows)}
            yield sample(f"aten.{name}.default", f"{dim}", **given)
        yield sample(
            "aten.index_add.default",
            f"scaled {dim}",
            self=n(6, 6),
            dim=dim,
            index=place,
            source=n(6, 6),
            alpha=2,
        )
        yield sample(
            "aten.index_add.default",
            f"integers {dim}",
            self=ints(6, 6),
            dim=dim,
            index=place,
            source=ints(6, 6),
        )
        yield sample(
            "aten.index_fill.int_Scalar", f"{dim}", self=n(6, 6), dim=dim, index=ints(3), value=0.5
        )
        yield sample(
            "aten.index_fill.int_Tensor", f"{dim}", self=n(6, 6), dim=dim, index=ints(3), value=n()
        )
        yield sample(
            "aten.index_reduce.default",
            f"{dim}",
            self=f(6, 6),
            dim=dim,
            index=ints(6),
            source=f(6, 6),
            reduce="amax",
        )
    yield sample("aten.slice_scatter.default", self=n(6, 12), src=n(6, 6), dim=1, start=2, end=8)
    yield sample("aten.slice_scatter.default", "strided", self=n(12, 6), src=n(6, 6), dim=0, step=2)
    yield sample("aten.select_scatter.default", self=n(6, 6, 12), src=n(6, 12), dim=-2, index=3)
    yield sample("aten.diagonal_scatter.default", self=n(6, 6, 12), src=n(12, 6))
    yield sample("aten.masked_select.default", self=n(6, 6), mask=bools(6, 6))
    yield sample("aten.masked_scatter.default", self=n(6, 6), mask=bools(6, 6), source=n(36))
    yield sample("aten.take.default", self=n(6, 6), index=ints(6, high=36))
    yield sample("aten.put.default", self=n(6, 6), index=torch.arange(6), source=n(6))
    yield sample("aten.one_hot.default", "two dims", self=ints(6, 12), num_classes=6)
    yield sample("aten.one_hot.default", "counted", self=torch.arange(6), num_classes=-1)
    bounds = torch.arange(0.1, 1, 0.2, dtype=torch.float64)
    yield sample("aten.bucketize.Scalar", self=0.4, boundaries=bounds)
    yield sample("aten.searchsorted.Tensor", sorted_sequence=bounds, self=f(6, 12), right=True)
    yield sample(
        "aten.searchsorted.Tensor", "rows", sorted_sequence=f(6, 6).sort().values, self=f(6, 12)
    )
    yield sample(
        "aten.searchsorted.Tensor",
        "sorter",
        sorted_sequence=bounds,
        self=f(6),
        sorter=torch.arange(len(bounds)),
    )
    yield sample("aten.searchsorted.Scalar", sorted_sequence=bounds, self=0.4)
    yield sample("aten.isin.Tensor_Tensor", elements=ints(6, 12), test_elements=ints(2, 2))
    yield sample("aten.isin.Tensor_Scalar", elements=ints(6, 12), test_element=3)
    yield sample("aten.isin.Scalar_Tensor", element=3, test_elements=ints(6))
    offsets = torch.tensor([0, 2, 6])
    for kind in (
        "embedding_bag.default",
        "embedding_bag.padding_idx",
        "_embedding_bag.default",
        "_embedding_bag_forward_only.default",
    ):
        for mode in (0, 1, 2):
            given: dict[str, Any] = {
                "scale_grad_by_freq": False,
                "mode": mode,
                "sparse": False,
                "include_last_offset": False,
            }
            if "padding" in kind:
                given |= {"per_sample_weights": None, "padding_idx": 3}
            yield sample(
                f"aten.{kind}",
                f"mode {mode}",
                weight=n(12, 6),
                indices=ints(12, high=12),
                offsets=offsets,
                **given,
            )
    given = {"per_sample_weights": f(12), "mode": 0, "scale_grad_by_freq": False, "sparse": False}
    yield sample(
        "aten.embedding_bag.default",
        "weights",
        weight=n(12, 6),
        indices=ints(12, high=12),
        offsets=offsets,
        **given,
    )


def layouts() -> Iterator[Sample]:
    """Operators that cut out, repeat, mirror and rearrange elements."""
    for name, given in (
        ("swapaxes", {"axis0": 0, "axis1": -1}),
        ("swapdims", {"dim0": 0, "dim1": -1}),
        ("mH", {}),
        ("matrix_H", {}),
        ("atleast_1d", {}),
        ("atleast_2d", {}),
        ("atleast_3d", {}),
    ):
        yield sample(f"aten.{name}.default", self=n(6, 12), **given)
    yield sample("aten.atleast_3d.default", "vector", self=n(6))
    yield sample("aten.transpose.int", "number", self=n(), dim0=0, dim1=-1)
    for name in ("movedim", "moveaxis"):
        yield sample(f"aten.{name}.int", "number", self=n(), source=0, destination=-1)
        yield sample(f"aten.{name}.int", self=n(6, 12, 2), source=0, destination=-1)
        yield sample(f"aten.{name}.intlist", self=n(6, 12, 2), source=[2, 0], destination=[0, 1])
    for size, dim in ((6, -1), (4, 1), (5, 1)):
        yield sample(
            "aten.unsafe_split.Tensor", f"{size} {dim}", self=n(6, 12), split_size=size, dim=dim
        )
    yield sample("aten.unsafe_chunk.default", self=n(6, 18), chunks=3, dim=1)
    yield sample("aten.unsafe_split_with_sizes.default", self=n(6, 12), split_sizes=[6, 6], dim=1)
    yield sample("aten.tensor_split.sections", self=n(6, 12), sections=2, dim=1)
    yield sample("aten.tensor_split.sections", "ragged", self=n(6, 12), sections=5, dim=1)
    yield sample("aten.cat.default", "an empty vector", tensors=[n(0), n(6, 6)], dim=1)
    for name in ("diagonal", "linalg_diagonal"):
        first = names(f"aten.{name}.default")[0]
        for given in ({}, {"offset": 1, "dim1": 0, "dim2": -1}):
            yield sample(f"aten.{name}.default", f"{given}", **{first: n(6, 6, 12)}, **given)
    for given in ({}, {"offset": 1, "dim1": 0, "dim2": -1}):
        yield sample("aten.diag_embed.default", f"{given}", self=n(6, 12), **given)
    yield sample("aten.meshgrid.default", tensors=[n(6), n(12)])
    for how in ("ij", "xy"):
        yield sample("aten.meshgrid.indexing", how, tensors=[n(6), n(12), n()], indexing=how)
    for size, step in ((2, 2), (4, 2), (6, 6), (5, 5)):
        yield sample(
            "aten.unfold.default",
            f"{size} {step}",
            self=n(6, 24),
            dimension=-1,
            size=size,
            step=step,
        )
    yield sample("aten.unfold.default", "number", self=n(), dimension=0, size=1, step=1)
    yield sample(
        "aten.repeat_interleave.self_int",
        "to a size",
        self=n(6, 6),
        repeats=3,
        dim=0,
        output_size=18,
    )
    yield sample("aten.repeat_interleave.self_Tensor", self=n(6, 6), repeats=ints(6), dim=1)
    yield sample("aten.repeat_interleave.self_Tensor", "flat", self=n(6), repeats=ints(6))
    yield sample("aten.repeat_interleave.Tensor", repeats=ints(6))
    yield sample("aten.repeat.default", "of one", self=n(6, 1), repeats=[1, 6])
    yield sample("aten.rot90.default", self=n(6, 12, 6), k=1, dims=[0, 1])
    yield sample("aten.rot90.default", "others", self=n(6, 6, 12), k=3, dims=[-1, 1])
    yield sample("aten.fliplr.default", self=n(6, 12))
    yield sample("aten.flipud.default", self=n(6, 12))
    yield sample("aten.diff.default", self=n(6, 12))
    yield sample("aten.diff.default", "twice", self=n(12, 6), n=2, dim=0)
    yield sample(
        "aten.diff.default", "joined", self=n(6, 12), dim=1, prepend=n(6, 1), append=n(6, 2)
    )
    for name in ("trapezoid", "trapz", "cumulative_trapezoid"):
        first = names(f"aten.{name}.x")[0]
        yield sample(f"aten.{name}.x", **{first: n(6, 12)}, x=f(12), dim=-1)
        yield sample(f"aten.{name}.x", "everywhere", **{first: n(12, 6)}, x=f(12, 6), dim=0)
        yield sample(f"aten.{name}.dx", **{first: n(6, 12)}, dx=2)
    for name in ("hstack", "vstack", "dstack", "row_stack", "column_stack"):
        yield sample(f"aten.{name}.default", tensors=[n(6, 6, 6), n(6, 6, 6)])
        yield sample(f"aten.{name}.default", "vectors", tensors=[n(6), n(6)])
    for lead in ((), (6,)):
        yield sample(
            "aten.pixel_shuffle.default", f"{lead}", self=n(*lead, 24, 6, 6), upscale_factor=2
        )
        yield sample(
            "aten.pixel_unshuffle.default", f"{lead}", self=n(*lead, 6, 12, 12), downscale_factor=2
        )
    yield sample("aten.channel_shuffle.default", self=n(6, 12, 2, 2), groups=2)
    window = {"kernel_size": [2, 2], "dilation": [1, 1], "padding": [1, 1], "stride": [1, 1]}
    for lead in ((6,), ()):
        yield sample("aten.im2col.default", f"{lead}", self=n(*lead, 6, 4, 4), **window)
        yield sample(
            "aten.col2im.default", f"{lead}", self=n(*lead, 24, 25), output_size=[4, 4], **window
        )
    yield sample("aten.view.dtype", self=f(6, 12), dtype="int64")
    yield sample("aten.view.dtype", "smaller", self=f(6, 12), dtype="int32")
    for d, pad in ((1, [1, 2]), (2, [1, 0, 0, 2]), (3, [0, 0, 1, 1, 0, 0])):
        for name in ("reflection", "replication"):
            yield sample(f"aten.{name}_pad{d}d.default", self=n(6, 6, *(6,) * d), padding=pad)
            yield sample(
                f"aten.{name}_pad{d}d.default", "one image", self=n(6, *(6,) * d), padding=pad
            )
    yield sample("aten._pad_circular.default", self=n(6, 6, 6), pad=[1, 1])
    for name in ("constant_pad_nd", "pad"):
        yield sample(f"aten.{name}.default", "shifted", self=n(6, 12), pad=[1, -1])
    yield sample("aten.diag.default", self=n(6, 6))
    yield sample("aten.diagflat.default", self=n(6, 6))
    yield sample("aten.trace.default", self=n(6, 6))
    yield sample("aten.block_diag.default", tensors=[n(6, 6), n(2, 6)])
    yield sample("aten.cartesian_prod.default", tensors=[n(6), n(2)])
    yield sample("aten.combinations.default", self=n(6), r=2)
    yield sample("aten.as_strided.default", self=n(6, 6), size=[6, 2], stride=[6, 2])
    yield sample(
        "aten.as_strided_scatter.default", self=n(6, 6), src=n(6, 2), size=[6, 2], stride=[6, 2]
    )
    for name in (
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "unique_consecutive",
        "_unique",
        "_unique2",
        "bincount",
    ):
        yield by_order(f"aten.{name}.default", "", ints(12))
    yield sample("aten.nonzero_static.default", self=ints(12), size=6)
    for name in ("unique_dim", "unique_dim_consecutive"):
        yield sample(f"aten.{name}.default", self=ints(6, 6), dim=1)
    yield sample("aten.histogram.bin_ct", self=f(12), bins=4)


_ALL = (points, places, layouts)
FAMILIES = {family.__name__: family for family in _ALL}
