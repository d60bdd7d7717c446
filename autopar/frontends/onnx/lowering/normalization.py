"""Normalisations by the mean and variance, or a norm, of some dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.frontends.onnx.values import dtype_name
from autopar.ir import Role

from .symbols import Symbol, promoted, where
from .trace import Asked


def _wide(x: Symbol, stash_type: int = 1) -> Symbol:
    """The values in the operator's stash type, never narrower than they are."""
    return x.to(promoted(x.dtype, dtype_name(stash_type, "a stash type")))


def _standard(x: Symbol, dims: tuple[int, ...], epsilon: float) -> tuple[Symbol, Symbol, Symbol]:
    """The values of zero mean and unit variance over dims, their mean, and 1 / their deviation."""
    mean = x.mean(*dims, keep=True)
    centred = x - mean
    inverse = ((centred * centred).mean(*dims, keep=True) + epsilon).map("rsqrt")
    return centred * inverse, mean, inverse


def layer_normalization(
    asked: Asked,
    *,
    X: Symbol,
    Scale: Symbol,
    B: Symbol | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Symbol, ...]:
    """Normalise over the dims from `axis` on, then scale.

    Also returns the mean and the inverse deviation.
    """
    shape = X.shape[axis % X.rank :]
    if len(asked.outputs) == 1 and Scale.shape == shape and (B is None or B.shape == shape):
        y = X.new(
            "layer_norm.default", input=X, normalized_shape=shape, weight=Scale, bias=B, eps=epsilon
        )
        return (y,)
    dims = tuple(range(axis % X.rank, X.rank))
    normal, mean, inverse = _standard(_wide(X, stash_type), dims, epsilon)
    y = normal.to(X.dtype) * Scale
    return (y if B is None else y + B), mean, inverse


def rms_normalization(
    *, X: Symbol, scale: Symbol, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Symbol:
    """Scaled values of unit mean square over the dims from `axis` on."""
    shape = X.shape[axis % X.rank :]
    if scale.shape == shape:
        given = {"normalized_shape": shape, "weight": scale, "eps": epsilon}
        return X.new("rms_norm.default", input=X, **given)
    dims = tuple(range(axis % X.rank, X.rank))
    x = _wide(X, stash_type)
    return (x * ((x * x).mean(*dims, keep=True) + epsilon).map("rsqrt")).to(X.dtype) * scale


def per_channel(vector: Symbol, like: Symbol) -> Symbol:
    """A value for each channel, broadcast over all other dims."""
    return vector.reshape(1, -1, *([1] * (like.rank - 2)))


def batch_normalization(
    *,
    X: Symbol,
    scale: Symbol,
    B: Symbol,
    input_mean: Symbol,
    input_var: Symbol,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    **_: object,
) -> tuple[Symbol, ...]:
    """Normalise each channel by the running statistics, or while training by the batch's own.

    Also returns the new running mean and variance.
    """
    stored = {input_mean.val.role, input_var.val.role} <= {Role.CONSTANT, Role.PARAMETER}
    if not training_mode and stored:
        y = X.new(
            "batch_norm.default",
            input=X,
            weight=scale.to(X.dtype),
            bias=B.to(X.dtype),
            running_mean=input_mean,
            running_var=input_var,
            training=False,
            momentum=1 - momentum,
            eps=epsilon,
            cudnn_enabled=False,
        )
        return y, input_mean, input_var
    dims = tuple(i for i in range(X.rank) if i != 1)
    mean = X.mean(*dims) if training_mode else input_mean
    centred = X - per_channel(mean, X)
    variance = (centred * centred).mean(*dims) if training_mode else input_var
    inverse = (variance + epsilon).map("rsqrt") * scale
    y = centred * per_channel(inverse, X) + per_channel(B, X)
    running = (
        input_mean * momentum + mean * (1 - momentum),
        input_var * momentum + variance * (1 - momentum),
    )
    return (y.to(X.dtype), *(running if training_mode else ()))


def instance_normalization(
    *, input: Symbol, scale: Symbol, B: Symbol, epsilon: float = 1e-5
) -> Symbol:
    """Normalise each channel of each sample."""
    given = {"num_groups": input.shape[1], "weight": scale, "bias": B, "eps": epsilon}
    return input.new("group_norm.default", input=input, **given)


def group_normalization(
    *,
    X: Symbol,
    scale: Symbol,
    bias: Symbol,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Symbol:
    """Normalise each group of channels of each sample.

    Opset 18 scales by group, later opsets by channel.
    """
    repeats = X.shape[1] // scale.size
    if repeats > 1:
        scale = scale.repeat_interleave(repeats, 0)
        bias = bias.repeat_interleave(repeats, 0)
    given = {"num_groups": num_groups, "weight": scale, "bias": bias, "eps": epsilon}
    return X.new("group_norm.default", input=X, **given)


def local_response_normalization(
    *, X: Symbol, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Symbol:
    """Divide by a power of the mean square of the neighbouring channels."""
    # An even window has its longer half at the end, as the operator's formula rounds.
    before = (0, (size - 1) // 2, *[0] * (X.rank - 2))
    after = (0, size // 2, *[0] * (X.rank - 2))
    total = (X * X).pad(before, after).unfold(1, size, 1).sum(-1)
    return X / (total * (alpha / size) + bias) ** beta


def lp_normalization(*, input: Symbol, axis: int = -1, p: int = 2) -> Symbol:
    """Divide by the p-norm along a dim; zero where the norm is zero."""
    # Torch's own default is the norm of order 2.
    order = {} if p == 2 else {"ord": p}
    norm = input.reduced("linalg_vector_norm.default", (axis,), True, **order)
    # Divided by zero, a row of zeros would be NaN.
    return input / where(norm > 0, norm, 1)


def mean_variance_normalization(*, X: Symbol, axes: tuple[int, ...] = (0, 2, 3)) -> Symbol:
    """Values of zero mean and unit variance over `axes`."""
    centred = X - X.mean(*axes, keep=True)
    return centred / ((centred * centred).mean(*axes, keep=True).map("sqrt") + 1e-9)


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "RMSNormalization": rms_normalization,
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LRN": local_response_normalization,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
}
ASKING: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "LayerNormalization": layer_normalization
}
