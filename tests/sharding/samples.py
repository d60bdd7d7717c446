"""Sample calls of every operator kind of torch that has a rule; sizes divide by 2 and by 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.operators.functions import function_of
from autopar.runtime.proof import Sample, sample
from autopar.sharding.rules import RULES

_SEED = iter(range(10**6))


def f(*shape: int, low: float = 0.2, high: float = 0.8) -> Tensor:
    """Floats between `low` and `high`, where every elementwise function is smooth."""
    generator = torch.Generator().manual_seed(next(_SEED))
    return torch.rand(shape, dtype=torch.float64, generator=generator) * (high - low) + low


def n(*shape: int) -> Tensor:
    """Floats of either sign."""
    return f(*shape, low=-1.0, high=1.0)


def ints(*shape: int, high: int = 6) -> Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(next(_SEED)))


def bools(*shape: int) -> Tensor:
    """True or False."""
    return ints(*shape, high=2).bool()


_SECOND: dict[str, dict[str, Any]] = {
    "aten.clamp.default": {"min": 0.4, "max": 0.6},
    "aten.clamp_min.default": {"min": 0.5},
    "aten.clamp_max.default": {"max": 0.5},
    "aten.to.dtype": {"dtype": "float64"},
    "aten.to.dtype_layout": {"dtype": "float64"},
    "aten._to_copy.default": {"dtype": "float64"},
    "aten.to.device": {"device": "cpu", "dtype": "float64"},
    "aten.dropout.default": {"p": 0.4, "train": True},
    "aten.feature_dropout.default": {"p": 0.4, "train": True},
    "aten.clip.default": {"min": 0.4, "max": 0.6},
    "aten.threshold.default": {"threshold": 0.5, "value": 0.1},
    "aten.mvlgamma.default": {"p": 1},
    "aten.randint_like.default": {"high": 9},
    "aten.randint_like.low_dtype": {"low": 2, "high": 9},
}
_ONLY_INTEGERS = ("bitwise", "__and__", "__or__", "__xor__")


def unary() -> Iterator[Sample]:
    """Functions of one tensor."""
    for kind, entry in RULES.items():
        if (
            kind.startswith("aten.")
            and (entry.rule == "* -> *" or kind in _SECOND)
            and exists(kind)
        ):
            first = function_of(kind)._schema.arguments[0].name  # type: ignore[attr-defined]
            if "acosh" in kind or "arccosh" in kind:
                value = f(6, 12) + 1
            elif "bitwise" in kind or "logical" in kind:
                value = ints(6, 12)
            else:
                value = f(6, 12)
            yield sample(kind, **{first: value}, **_SECOND.get(kind, {}))
    for kind in ("neg", "alias", "contiguous", "clone", "lift_fresh_copy", "conj", "resolve_conj"):
        yield sample(f"aten.{kind}.default", self=n(6, 4))
    yield sample("aten.dropout.default", "evaluated", input=n(6, 12), p=0.4, train=False)
    yield sample(
        "aten.feature_dropout.default", "of channels", input=n(6, 6, 2, 2), p=0.4, train=True
    )


def binary() -> Iterator[Sample]:
    """Functions of two tensors, or of a tensor and a number, with the shapes that broadcast."""
    for kind in (
        "add.Tensor",
        "sub.Tensor",
        "rsub.Tensor",
        "mul.Tensor",
        "div.Tensor",
        "maximum.default",
        "minimum.default",
    ):
        for left, right in (
            ((6, 12), (6, 12)),
            ((6, 12), (12,)),
            ((6, 1), (6, 12)),
            ((6,), (6, 6, 6)),
            ((6, 6), ()),
        ):
            yield sample(f"aten.{kind}", self=f(*left), other=f(*right))
    yield sample("aten.add.Tensor", "scaled", self=n(6, 6), other=n(6), alpha=2)
    yield sample("aten.add.Tensor", "and a number", self=n(6, 6), other=2.5)
    yield sample("autopar.add", a=n(6, 6), b=n(6, 6))
    for kind in ("atan2.default", "pow.Tensor_Tensor"):
        yield sample(
            f"aten.{kind}", **dict(zip(names(f"aten.{kind}"), (f(6, 12), f(12)), strict=False))
        )
    for kind in ("add", "sub", "rsub", "mul", "div"):
        yield sample(f"aten.{kind}.Scalar", self=n(6, 6), other=2.5)
    yield sample("aten.div.Tensor_mode", self=n(6, 6), other=f(6), rounding_mode="floor")
    yield sample("aten.floor_divide.default", self=ints(6, 6, high=50), other=ints(6) + 1)
    yield sample("aten.remainder.Scalar", self=n(6, 6), other=0.3)
    yield sample("aten.remainder.Tensor", self=n(6, 6), other=f(6))
    yield sample("aten.fmod.Scalar", self=n(6, 6), other=0.3)
    yield sample("aten.pow.Tensor_Scalar", self=f(6, 6), exponent=3)
    yield sample("aten.pow.Scalar", self=2.0, exponent=f(6, 6))
    yield sample("aten.clamp.Tensor", self=n(6, 6), min=f(6, low=-0.6, high=-0.2), max=f(6, 1))
    for kind in ("addcmul", "addcdiv"):
        yield sample(f"aten.{kind}.default", self=n(6, 6), tensor1=n(6), tensor2=f(6, 1), value=2)
    yield sample("aten.lerp.Scalar", self=n(6, 6), end=n(6), weight=0.3)
    yield sample("aten.lerp.Tensor", self=n(6, 6), end=n(6), weight=f(6, 1))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield sample(f"aten.{name}.Tensor", self=ints(6, 6), other=ints(6))
        yield sample(f"aten.{name}.Scalar", self=ints(6, 6), other=3)
    for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"):
        yield sample(f"aten.{name}.Tensor", self=ints(6, 6), other=ints(6))
        yield sample(f"aten.{name}.Scalar", self=ints(6, 6), other=3)
    for name in ("and", "or", "xor"):
        yield sample(f"aten.logical_{name}.default", self=bools(6, 6), other=bools(6, 1))
    yield sample("aten.type_as.default", self=n(6, 6), other=n(6, 6))
    yield sample("aten.to.other", self=n(6, 6), other=n(6, 6))
    yield sample("aten.where.self", condition=bools(6, 6), self=n(6, 6), other=n(6))
    yield sample("aten.where.self", "broadcast", condition=bools(6, 1), self=n(6), other=n(6, 6))
    yield sample("aten.where.ScalarOther", condition=bools(6, 6), self=n(6, 6), other=0.5)
    yield sample("aten.where.ScalarSelf", condition=bools(6, 6), self=0.5, other=n(6, 6))
    yield sample("aten.masked_fill.Scalar", self=n(6, 6, 6), mask=bools(6, 1), value=0.5)
    yield sample("aten.masked_fill.Tensor", self=n(6, 6, 6), mask=bools(6, 6), value=n())


def products() -> Iterator[Sample]:
    """Matrix products."""
    yield sample("aten.linear.default", input=n(6, 2, 12), weight=n(6, 12), bias=n(6))
    yield sample("aten.linear.default", "no bias", input=n(6, 12), weight=n(6, 12), bias=None)
    yield sample("aten.linear.default", "vector", input=n(12), weight=n(6, 12), bias=n(6))
    yield sample("autopar.affine", input=n(6, 2, 12), weight=n(12, 6), bias=n(6))
    yield sample("autopar.affine", "no bias", input=n(6, 12), weight=n(12, 6))
    for shape in ((6, 12), (12,), (6, 1), (1,)):
        yield sample("aten.addmm.default", self=n(*shape), mat1=n(6, 6), mat2=n(6, 12))
    yield sample(
        "aten.addmm.default", "scaled", self=n(12), mat1=n(6, 6), mat2=n(6, 12), beta=0.5, alpha=2.0
    )
    yield sample("aten.mm.default", self=n(6, 12), mat2=n(12, 6))
    yield sample("aten.bmm.default", self=n(6, 2, 12), mat2=n(6, 12, 6))
    yield sample("aten.baddbmm.default", self=n(6, 2, 6), batch1=n(6, 2, 12), batch2=n(6, 12, 6))
    for left, right in (
        ((6,), (6,)),
        ((6, 12), (12,)),
        ((12,), (12, 6)),
        ((6, 12), (12, 6)),
        ((6, 2, 12), (12, 6)),
        ((6, 2, 12), (6, 12, 6)),
        ((6, 1, 2, 6), (6, 6, 6)),
        ((12,), (6, 12, 6)),
        ((6, 2, 12), (12,)),
        ((6, 6), (6, 6, 6)),
        ((1, 6, 6), (6, 6, 6)),
    ):
        yield sample("aten.matmul.default", self=n(*left), other=n(*right))
    yield sample("aten.mv.default", self=n(6, 12), vec=n(12))
    yield sample("aten.dot.default", self=n(12), tensor=n(12))
    yield sample("aten.outer.default", self=n(6), vec2=n(12))
    for equation, shapes in (
        ("bhqd,bhkd->bhqk", ((2, 6, 3, 6), (2, 6, 6, 6))),
        ("ij,jk", ((6, 12), (12, 6))),
        ("ij->", ((6, 12),)),
        ("ij->ji", ((6, 12),)),
        ("i,ij,jk->k", ((6,), (6, 6), (6, 6))),
        ("bij,b->ij", ((6, 6, 2), (6,))),
    ):
        yield sample(
            "aten.einsum.default", equation, equation=equation, tensors=[n(*s) for s in shapes]
        )


def attention() -> Iterator[Sample]:
    """Attention: equal and grouped heads, causal, masks of every rank, three dims."""
    kind = "aten.scaled_dot_product_attention.default"
    q = n(6, 6, 6, 2)
    k = n(6, 6, 6, 2)
    v = n(6, 6, 6, 6)
    yield sample(kind, query=q, key=k, value=v)
    yield sample(kind, "causal", query=q, key=k, value=v, is_causal=True)
    yield sample(kind, "scaled", query=q, key=k, value=v, scale=0.3)
    for shape in (
        (6, 6),
        (1, 6, 6),
        (6, 6, 6),
        (6, 1, 6, 6),
        (6, 6, 6, 6),
        (1, 1, 6, 6),
        (6, 1, 1, 6),
    ):
        mask = bools(*shape)
        mask[..., 0] = True
        yield sample(kind, f"mask {list(shape)}", query=q, key=k, value=v, attn_mask=mask)
    yield sample(kind, "added mask", query=q, key=k, value=v, attn_mask=n(6, 1, 6, 6))
    yield sample(kind, "three dims", query=n(6, 6, 2), key=n(6, 6, 2), value=n(6, 6, 6))
    for groups, repeats in ((6, 2), (2, 6), (1, 6), (3, 4)):
        given = {"key": n(2, groups, 6, 2), "value": n(2, groups, 6, 6), "enable_gqa": True}
        yield sample(
            kind, f"grouped {groups}x{repeats}", query=n(2, groups * repeats, 3, 2), **given
        )
    mask = n(2, 12, 3, 6)
    yield sample(
        kind,
        "grouped, masked",
        query=n(2, 12, 3, 2),
        key=n(2, 6, 6, 2),
        value=n(2, 6, 6, 6),
        attn_mask=mask,
        enable_gqa=True,
    )
    yield sample(kind, "dropout", query=q, key=k, value=v, dropout_p=0.4, is_causal=True)


def windows() -> Iterator[Sample]:
    """Convolutions and pools."""
    for d in (1, 2, 3):
        space = (3,) * d
        kind = f"aten.conv{d}d.default"
        same = {"stride": [1] * d, "padding": [1] * d, "dilation": [1] * d}
        window = (2,) * d
        yield sample(
            kind,
            f"{d}d",
            input=n(6, 6, *space),
            weight=n(12, 6, *window),
            bias=n(12),
            groups=1,
            **same,
        )
        yield sample(
            kind,
            f"{d}d no bias",
            input=n(6, 6, *space),
            weight=n(6, 6, *window),
            bias=None,
            groups=1,
            **same,
        )
        yield sample(
            kind,
            f"{d}d groups",
            input=n(2, 12, *space),
            weight=n(24, 2, *window),
            bias=n(24),
            groups=6,
            **same,
        )
        yield sample(
            kind,
            f"{d}d depthwise",
            input=n(2, 6, *space),
            weight=n(6, 1, *window),
            bias=n(6),
            groups=6,
            **same,
        )
        yield sample(
            kind,
            f"{d}d multiplied",
            input=n(2, 6, *space),
            weight=n(12, 1, *window),
            bias=n(12),
            groups=6,
            **same,
        )
        yield sample(
            kind,
            f"{d}d one image",
            input=n(6, *space),
            weight=n(6, 6, *window),
            bias=n(6),
            groups=1,
            **same,
        )
        yield sample(
            kind,
            f"{d}d one output a group",
            input=n(2, 12, *space),
            weight=n(6, 2, *window),
            bias=n(6),
            groups=6,
            **same,
        )
        pooled = {"kernel_size": [2] * d, "stride": [2] * d}
        for lead in ((6, 6), (6,)):
            for kind in ("max_pool", "avg_pool"):
                yield sample(f"aten.{kind}{d}d.default", self=n(*lead, *space), **pooled)
            yield sample(
                f"aten.adaptive_avg_pool{d}d.default", self=n(*lead, *space), output_size=[2] * d
            )
    for d in (1, 2):
        given = {"input": n(6, 6, *(4,) * d), "weight": n(6, 6, *(3,) * d), "bias": n(6)}
        yield sample(f"aten.conv{d}d.padding", **given, padding="same")


def normal() -> Iterator[Sample]:
    """Normalisations and softmax."""
    yield sample(
        "aten.layer_norm.default",
        input=n(6, 6, 6),
        normalized_shape=[6],
        weight=n(6),
        bias=n(6),
        eps=1e-5,
    )
    yield sample(
        "aten.layer_norm.default",
        "two dims",
        input=n(6, 6, 6),
        normalized_shape=[6, 6],
        weight=n(6, 6),
        bias=n(6, 6),
    )
    yield sample("aten.layer_norm.default", "bare", input=n(6, 6), normalized_shape=[6])
    yield sample(
        "aten.rms_norm.default", input=n(6, 6, 6), normalized_shape=[6], weight=n(6), eps=1e-5
    )
    for name in ("softmax.int", "log_softmax.int"):
        for dim in (0, 1, -1):
            yield sample(f"aten.{name}", f"dim {dim}", self=n(6, 6, 6), dim=dim)
    for name in ("_softmax", "_log_softmax"):
        yield sample(f"aten.{name}.default", self=n(6, 6), dim=-1, half_to_float=False)
    yield sample("aten._safe_softmax.default", self=n(6, 6), dim=1)
    running = {
        "running_mean": n(6),
        "running_var": f(6),
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }
    yield sample(
        "aten.batch_norm.default",
        input=n(6, 6, 4),
        weight=n(6),
        bias=n(6),
        training=False,
        **running,
    )
    unseen = {
        "running_mean": None,
        "running_var": None,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }
    yield sample(
        "aten.batch_norm.default",
        "of the batch",
        input=n(6, 6, 4),
        weight=n(6),
        bias=n(6),
        training=True,
        **unseen,
    )
    yield sample(
        "aten.group_norm.default", input=n(6, 12, 2, 2), num_groups=6, weight=n(12), bias=n(12)
    )
    yield sample(
        "aten.group_norm.default",
        "one group",
        input=n(6, 12, 2),
        num_groups=1,
        weight=n(12),
        bias=n(12),
    )


def reductions() -> Iterator[Sample]:
    """Sums, means and their like, over some dims and over all."""
    for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"):
        for dims in ((0,), (1, -1), (-1,), ()):
            for keep in (False, True):
                yield sample(
                    f"aten.{name}", f"{dims} {keep}", self=n(6, 6, 6), dim=list(dims), keepdim=keep
                )
    for name in ("sum", "mean", "max", "min", "prod", "argmax", "argmin"):
        yield sample(f"aten.{name}.default", self=n(6, 6))
    for name in ("argmax", "argmin"):
        yield sample(f"aten.{name}.default", "one dim", self=n(6, 6, 6), dim=1, keepdim=True)
    for name in ("var", "std"):
        yield sample(f"aten.{name}.correction", self=n(6, 6, 6), dim=[1], keepdim=True)
    yield sample("aten.linalg_vector_norm.default", self=n(6, 6, 6), dim=[-1], keepdim=True)
    yield sample("aten.logsumexp.default", self=n(6, 6, 6), dim=[1], keepdim=False)
    yield sample("aten.mean.dim", "in another type", self=n(6, 6), dim=[0], dtype="float64")
    yield sample("autopar.mean_square", x=n(6, 6), count=36)


def views() -> Iterator[Sample]:
    """Views and reshapes."""
    yield sample("aten.broadcast_tensors.default", tensors=[n(6, 12), n(12), n(6, 1), n(6, 12)])
    yield sample("aten.broadcast_tensors.default", "both", tensors=[n(6, 1), n(12)])
    for name in ("view.default", "reshape.default", "_unsafe_view.default"):
        for before, after in (
            ((6, 12), (72,)),
            ((72,), (6, 12)),
            ((6, 36), (6, 6, 6)),
            ((6, 6, 6), (36, 6)),
            ((6, 4), (4, 6)),
            ((6, 12), (6, 1, -1)),
        ):
            size = {"shape" if name == "reshape.default" else "size": list(after)}
            yield sample(f"aten.{name}", f"{before} {after}", self=n(*before), **size)
    yield sample("aten.unsqueeze.default", self=n(6, 12), dim=1)
    yield sample("aten.squeeze.dims", "to shards of one row", self=n(2, 1, 12), dim=[1])
    yield sample("aten.squeeze.dims", self=n(1, 6, 1, 12), dim=[0, 2])
    yield sample("aten.flatten.using_ints", self=n(6, 6, 6), start_dim=1, end_dim=-1)
    yield sample("aten.unflatten.int", self=n(6, 36), dim=1, sizes=[6, -1])
    yield sample("aten.view_as.default", self=n(6, 36), other=n(6, 6, 6))
    yield sample("aten.reshape_as.default", self=n(6, 36), other=n(6, 6, 6))
    yield sample("aten.ravel.default", self=n(6, 12))
    yield sample("aten.transpose.int", self=n(6, 12, 2), dim0=0, dim1=-1)
    yield sample("aten.permute.default", self=n(6, 12, 2), dims=[2, 0, 1])
    yield sample("aten.t.default", self=n(6, 12))
    yield sample("aten.t.default", "vector", self=n(6))
    yield sample("aten.mT.default", self=n(6, 12, 2))
    yield sample("aten.numpy_T.default", self=n(6, 12, 2))
    yield sample("aten.adjoint.default", self=n(6, 12))
    for after in ((6, 12), (6, 6, 12), (6, -1, 12)):
        yield sample(
            "aten.expand.default",
            self=n(6, 12) if after[0] == 6 and len(after) == 2 else n(6, 1, 12),
            size=list(after),
        )
    yield sample("aten.expand.default", "vector", self=n(1), size=[6, 12])
    yield sample("aten.expand_as.default", self=n(6, 1), other=n(6, 12))
    yield sample("aten.broadcast_to.default", self=n(6, 1), size=[6, 12])


def moves() -> Iterator[Sample]:
    """Operators that cut, join and move elements."""
    yield sample("aten.slice.Tensor", self=n(6, 12), dim=1, start=2, end=8)
    yield sample("aten.slice.Tensor", "all", self=n(6, 12), dim=1, start=0, end=9223372036854775807)
    yield sample("aten.slice.Tensor", "strided", self=n(6, 12), dim=0, start=0, end=6, step=2)
    yield sample("aten.slice.Tensor", "backwards", self=n(6, 12), dim=-1, start=-6, end=12)
    yield sample("aten.narrow.default", self=n(6, 12), dim=1, start=3, length=6)
    yield sample("aten.narrow.default", "all", self=n(6, 12), dim=1, start=0, length=12)
    yield sample("aten.constant_pad_nd.default", self=n(6, 12), pad=[2, 4], value=1.0)
    yield sample("aten.pad.default", self=n(6, 6, 12), pad=[1, 1, 2, 4])
    yield sample("aten.pad.default", "circular", self=n(6, 6, 12), pad=[1, 1], mode="circular")
    yield sample("aten.flip.default", self=n(6, 12), dims=[0])
    yield sample("aten.roll.default", self=n(6, 12), shifts=[2], dims=[1])
    yield sample("aten.roll.default", "flat", self=n(6, 12), shifts=[2])
    yield sample("aten.tril.default", self=n(6, 6, 6))
    yield sample("aten.triu.default", self=n(6, 6, 6), diagonal=1)
    yield sample("aten.cumsum.default", self=n(6, 6, 6), dim=1)
    yield sample("aten.select.int", self=n(6, 6, 6), dim=1, index=2)
    for size, dim in ((6, -1), (4, 1), (3, 0), (5, 1), (12, 1)):
        yield sample("aten.split.Tensor", f"{size} {dim}", self=n(6, 12), split_size=size, dim=dim)
    yield sample("aten.chunk.default", self=n(6, 18), chunks=3, dim=1)
    yield sample("aten.chunk.default", "ragged", self=n(6, 8), chunks=3, dim=1)
    yield sample("aten.split_with_sizes.default", self=n(6, 12), split_sizes=[6, 6], dim=1)
    yield sample(
        "aten.split_with_sizes.default", "ragged", self=n(6, 12), split_sizes=[4, 8], dim=1
    )
    yield sample("aten.split.sizes", self=n(6, 12), split_size=[6, 6], dim=1)
    for name in ("cat", "concat", "concatenate"):
        for dim in (0, -1):
            yield sample(
                f"aten.{name}.default", f"{dim}", tensors=[n(6, 6), n(6, 6), n(6, 6)], dim=dim
            )
    yield sample("aten.cat.default", "ragged", tensors=[n(6, 6), n(6, 12)], dim=1)
    yield sample("aten.cat.default", "one", tensors=[n(6, 6)], dim=1)
    yield sample("aten.stack.default", tensors=[n(6, 6), n(6, 6)], dim=1)
    yield sample("aten.stack.default", "last", tensors=[n(6, 6), n(6, 6)], dim=-1)
    yield sample("aten.unbind.int", self=n(6, 3, 6), dim=1)
    yield sample("aten.repeat.default", self=n(6, 6), repeats=[2, 1, 3])
    yield sample("aten.tile.default", self=n(6, 6), dims=[2])
    yield sample("aten.embedding.default", weight=n(12, 6), indices=ints(6, 2, high=12))
    often = {"weight": n(12, 6), "indices": ints(6, 6, high=6), "scale_grad_by_freq": True}
    yield sample("aten.embedding.default", "scaled by how often", **often)
    yield sample(
        "aten.embedding.default",
        "padding",
        weight=n(12, 6),
        indices=ints(6, 6, high=12),
        padding_idx=7,
    )
    yield sample("aten.index.Tensor", self=n(6, 6), indices=[ints(6)])


def makers() -> Iterator[Sample]:
    """Operators that make a tensor from another's shape or from nothing."""
    yield sample("aten.arange.default", end=6)
    yield sample("aten.arange.start", start=2, end=8)
    yield sample("aten.arange.start_step", start=0, end=12, step=2)
    for name in ("zeros", "ones"):
        yield sample(f"aten.{name}.default", size=[6, 6])
        yield sample(f"aten.new_{name}.default", self=n(6), size=[6, 6])
        yield sample(f"aten.{name}_like.default", self=n(6, 6))
    yield sample("aten.full.default", size=[6, 6], fill_value=2.0)
    yield sample("aten.new_full.default", self=n(6), size=[6, 6], fill_value=2.0)
    yield sample("aten.full_like.default", self=n(6, 6), fill_value=2.0)
    yield sample("aten.eye.default", n=6)
    yield sample("aten.scalar_tensor.default", s=2.0)


def selections() -> Iterator[Sample]:
    """Sorting, resampling, scattering and gathering."""
    for dim in (0, 1, -1):
        yield sample("aten.sort.default", f"dim {dim}", self=n(6, 6, 6), dim=dim)
        yield sample("aten.topk.default", f"dim {dim}", self=n(6, 6, 6), k=2, dim=dim)
    yield sample("aten.topk.default", "all of them", self=n(6, 6), k=6)
    yield sample("aten.sort.stable", self=n(6, 6), stable=True, descending=True)
    yield sample("aten.argsort.default", self=n(6, 6))
    for d in (1, 2, 3):
        yield sample(
            f"aten.upsample_nearest{d}d.vec",
            input=n(6, 6, *(2,) * d),
            output_size=None,
            scale_factors=[2.0] * d,
        )
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        yield sample(
            f"aten.{name}.vec",
            input=n(6, 6, 2, 3),
            output_size=[4, 6],
            align_corners=False,
            scale_factors=None,
        )
        yield sample(
            f"aten.{name}.vec",
            "one dim",
            input=n(6, 6, 6, 3),
            output_size=[6, 6],
            align_corners=False,
            scale_factors=None,
        )
    yield sample("aten.repeat_interleave.self_int", self=n(6, 6), repeats=2, dim=1)
    yield sample("aten.repeat_interleave.self_int", "flat", self=n(6, 6), repeats=2)
    yield sample("aten.index_select.default", self=n(6, 6), dim=1, index=ints(4))
    yield sample("aten.gather.default", self=n(6, 6), dim=1, index=ints(6, 3))
    yield sample(
        "aten.index_put.default", self=n(6, 6), indices=[torch.tensor([1, 3])], values=n(2, 6)
    )
    yield sample("aten.index_add.default", self=n(6, 6), dim=0, index=ints(4), source=n(4, 6))
    yield sample(
        "aten.scatter.src", self=n(6, 6), dim=1, index=torch.arange(6).repeat(6, 1), src=n(6, 6)
    )
    yield sample("aten.scatter_add.default", self=n(6, 6), dim=1, index=ints(6, 6), src=n(6, 6))
    yield sample("aten.histc.default", self=f(12), bins=4, min=0, max=1)
    yield sample("aten.one_hot.default", self=ints(6), num_classes=6)
    yield sample(
        "aten.bucketize.Tensor",
        self=f(6, 6),
        boundaries=torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64),
    )


def names(kind: str) -> list[str]:
    """Formal names of an operator's arguments."""
    return [argument.name for argument in function_of(kind)._schema.arguments]  # type: ignore[attr-defined]


def exists(kind: str) -> bool:
    """Whether this torch has the operator."""
    try:
        function_of(kind)
    except ValueError:
        return False
    return True


def losses() -> Iterator[Sample]:
    """Loss functions in their three reductions (0: none, 1: mean, 2: sum)."""
    for reduction in (0, 1, 2):
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "kl_div",
        ):
            yield sample(
                f"aten.{name}.default",
                f"reduction {reduction}",
                self=f(6, 12),
                target=f(6, 12),
                reduction=reduction,
            )
        kind = "aten.binary_cross_entropy_with_logits.default"
        yield sample(
            kind, f"reduction {reduction}", self=n(6, 12), target=f(6, 12), reduction=reduction
        )
        yield sample(
            kind,
            f"broadcast {reduction}",
            self=n(6, 12),
            target=f(6, 12),
            pos_weight=ints(12) + 1,
            reduction=reduction,
        )
        kind = "aten.cross_entropy_loss.default"
        for shape, target in (((6, 12), (6,)), ((6, 6, 2, 6), (6, 2, 6)), ((6,), ())):
            settings = {"reduction": reduction, "ignore_index": 2, "label_smoothing": 0.1}
            yield sample(
                kind, f"{shape}, {reduction}", self=n(*shape), target=ints(*target), **settings
            )
        yield sample(
            kind, f"probabilities, {reduction}", self=n(6, 12), target=f(6, 12), reduction=reduction
        )
        yield sample(
            "aten.nll_loss_nd.default",
            f"reduction {reduction}",
            self=n(6, 12, 2),
            target=ints(6, 2),
            reduction=reduction,
        )
        yield sample(
            "aten.nll_loss.default",
            f"reduction {reduction}",
            self=n(6, 12),
            target=ints(6),
            reduction=reduction,
        )


_ALL = (
    unary,
    binary,
    products,
    attention,
    windows,
    normal,
    reductions,
    losses,
    views,
    moves,
    selections,
    makers,
)
FAMILIES = {family.__name__: family for family in _ALL}
