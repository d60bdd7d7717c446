"""Attributes that differ on a shard: sizes and counts that shrink with the split of a dim, and
numbers that are added to a share of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.errors import PlanError
from autopar.ir import Value
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import Changes, register
from autopar.sharding.layout import Kind


def shape_as(name: str) -> Changes:
    """The change that makes the attribute `name` the output's shape on a shard."""
    return lambda call: {name: call.local_output()}


def _sizes(call: LocalCall) -> Mapping[str, Value]:
    """`unflatten`: the sizes of the dims that take the place of one."""
    dim = call.operator.attributes["dim"]
    sizes = call.operator.attributes["sizes"]
    assert isinstance(dim, int) and isinstance(sizes, tuple)
    first = dim % len(call.inputs[0].shape)
    return {"sizes": call.local_output()[first : first + len(sizes)]}


def _split_dim(call: LocalCall) -> int:
    """The dim that an operator cuts or joins."""
    dim = call.operator.attributes.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(call.inputs[0].shape)


def _split_size(call: LocalCall) -> Mapping[str, Value]:
    return {"split_size": call.local_output()[_split_dim(call)]}


def _split_sizes(name: str) -> Changes:
    def rewrite(call: LocalCall) -> Mapping[str, Value]:
        if name not in call.operator.attributes:
            return {}
        return {
            name: tuple(call.local_output(i)[_split_dim(call)] for i in range(len(call.outputs)))
        }

    return rewrite


def _slice(call: LocalCall) -> Mapping[str, Value]:
    """The whole length: a slice of a split dim takes all of it."""
    dim = _split_dim(call)
    return {"start": 0, "end": call.local_output()[dim]} if call.split(0, dim) > 1 else {}


def _narrow(call: LocalCall) -> Mapping[str, Value]:
    """The whole length: a narrowing of a split dim takes all of it."""
    dim = _split_dim(call)
    return {"start": 0, "length": call.local_output()[dim]} if call.split(0, dim) > 1 else {}


def _repeated(call: LocalCall) -> Mapping[str, Value]:
    """The size of the repeated dim, if it is given along with the count."""
    given = isinstance(call.operator.attributes.get("output_size"), int)
    return {"output_size": call.local_output()[_split_dim(call)]} if given else {}


def _resampled(call: LocalCall) -> Mapping[str, Value]:
    """The size of the space, where it is given."""
    # Without a size the operator has factors, which are the same on a shard.
    if call.operator.attributes.get("output_size") is None:
        return {}
    return {"output_size": call.local_output()[2:]}


def _flat_group_norm(call: LocalCall) -> Mapping[str, Value]:
    """The sizes that `native_group_norm` takes as arguments: images, channels and groups."""
    images, channels, *_ = call.local_input(0)
    return {"N": images, "C": channels, "group": call.local_output(1)[1]}


def count(name: str, index: int, dim: int) -> Changes:
    """A count (of groups, heads) that shrinks with the split of dim `dim` of input `index`."""

    def rewrite(call: LocalCall) -> Mapping[str, Value]:
        value = call.operator.attributes.get(name)
        if not isinstance(value, int) or value <= 1 or index >= len(call.inputs):
            return {}
        degree = call.split(index, dim % len(call.inputs[index].shape))
        # A group that two ranks share would be computed on parts of its channels.
        if value % degree:
            raise PlanError(
                f"operator {call.operator.name!r}: {name} = {value} cannot be split {degree} times"
            )
        return {name: value // degree}

    return rewrite


def _grid(call: LocalCall) -> Mapping[str, Value]:
    """`AffineGrid`: the size of the images, of which only the number is split."""
    size = call.operator.attributes["size"]
    assert isinstance(size, tuple)
    return {"size": (call.local_output()[0], *size[1:])}


def _blocks(call: LocalCall) -> Mapping[str, Value]:
    """An adaptive pool: the output sizes of the spatial dims."""
    space = next(d for d in (1, 2, 3) if f"{d}d" in call.operator.kind)
    return {"output_size": call.local_output()[-space:]}


def _added(call: LocalCall) -> Mapping[str, Value]:
    """A number that is added: the shares of it add up to it."""
    number = call.operator.attributes.get("other")
    pairs = zip(call.mesh, call.decision.outputs[0], strict=True)
    shares = math.prod(size for size, placement in pairs if placement.kind is Kind.PARTIAL)
    if shares == 1 or not isinstance(number, int | float):
        return {}
    return {"other": number / shares}


for _kinds, _sizes_of in (
    (
        "aten.add.Tensor aten.sub.Tensor aten.rsub.Tensor aten.subtract.Tensor aten.add.Scalar "
        "aten.sub.Scalar aten.rsub.Scalar aten.subtract.Scalar",
        _added,
    ),
    ("aten.expand.default aten.broadcast_to.default", shape_as("size")),
    ("aten.reshape.default", shape_as("shape")),
    ("aten.zeros.default aten.ones.default aten.full.default", shape_as("size")),
    (
        "aten.new_zeros.default aten.new_ones.default aten.new_full.default aten.new_empty.default",
        shape_as("size"),
    ),
    (" ".join(f"aten.adaptive_avg_pool{d}d.default" for d in (1, 2, 3)), _blocks),
    ("aten.unflatten.int", _sizes),
    ("aten.split.Tensor aten.unsafe_split.Tensor", _split_size),
    (
        "aten.split_with_sizes.default aten.unsafe_split_with_sizes.default",
        _split_sizes("split_sizes"),
    ),
    ("aten.repeat_interleave.self_int", _repeated),
    ("aten.affine_grid_generator.default", _grid),
    (
        " ".join(
            f"aten.{name}{d}d.{form}"
            for name in ("upsample_nearest", "_upsample_nearest_exact")
            for d in (1, 2, 3)
            for form in ("vec", "default")
        ),
        _resampled,
    ),
    ("aten.native_group_norm.default", _flat_group_norm),
    ("aten.split.sizes", _split_sizes("split_size")),
    ("aten.slice.Tensor", _slice),
    ("aten.narrow.default", _narrow),
    ("aten.group_norm.default", count("num_groups", 0, 1)),
    ("aten.conv1d.default aten.conv2d.default aten.conv3d.default", count("groups", 1, 0)),
    ("aten.conv1d.padding aten.conv2d.padding", count("groups", 1, 0)),
    (
        "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input",
        count("groups", 1, 0),
    ),
    ("aten.convolution.default aten._convolution.default", count("groups", 1, 0)),
):
    register(_kinds, sizes=_sizes_of)
