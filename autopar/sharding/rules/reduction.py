"""Rules of reductions: a split reduced dim leaves a partial sum (or mean, maximum, minimum)."""

from __future__ import annotations

from collections.abc import Callable

from .registry import Call, register

_LAST = dict.fromkeys(
    ("aten.max.dim", "aten.min.dim", "aten.kthvalue.default", "aten.mode.default"), (-1,)
)


def _reduction(operation: str, missing: tuple[int, ...] | None = None) -> Callable[[Call], str]:
    """A rule that reduces dims by `operation` (`""`: they stay whole); `missing`: the dims if a
    call names none.
    """

    def rule(call: Call) -> str:
        shape = call.inputs[0].shape
        dims = call.dims(len(shape), "dim")
        if missing is not None and call.get("dim") is None:
            dims = tuple(sorted(dim % max(len(shape), 1) for dim in missing))
        whole = "" if operation else "!"
        keep = len(call.outputs[0].shape) == len(shape)
        ins = [f"{whole if i in dims else ''}d{i}" for i in range(len(shape))]
        outs = ["1" if i in dims else f"d{i}" for i in range(len(shape)) if keep or i not in dims]
        tail = f" | {', '.join(f'd{i}' for i in dims)}: {operation}" if operation and dims else ""
        return f"{' '.join(ins)} -> {', '.join(' '.join(outs) for _ in call.outputs)}{tail}"

    return rule


def _quantile(call: Call) -> str:
    """The sorted dim stays whole; several quantiles make a new dim in front."""
    shape = call.inputs[0].shape
    # Quantiles of shards do not tell the quantile of all.
    dims = call.dims(len(shape), "dim")
    names = [f"d{i}" for i in range(len(shape))]
    several = call.position("q") is not None and call.inputs[-1].shape != ()
    keep = bool(call.get("keepdim"))
    outs = ["1" if i in dims else name for i, name in enumerate(names) if keep or i not in dims]
    given = " ".join(f"!{name}" if i in dims else name for i, name in enumerate(names))
    rest = ""
    if call.position("q") is not None:
        rest = ", q" if several else ", "
    return f"{given}{rest} -> {' '.join([*(['q'] if several else []), *outs])}"


register("aten.sum.default aten.sum.dim_IntList", _reduction("sum"), linear=((0,),))
register("aten.mean.default aten.mean.dim", _reduction("mean"), linear=((0,),))
register("aten.amax.default aten.max.default", _reduction("max"))
register("aten.amin.default aten.min.default", _reduction("min"))
# These are not linear, yet the sums of shards add up: the function is applied before the sum.
register("autopar.mean_square", _reduction("sum"))
# Here a function follows the sum (a root, a logarithm), or shards have no reduction of their own
# that a collective offers (products, variances): the dims stay whole.
register("aten.prod.default aten.var.correction aten.std.correction", _reduction(""))
register("aten.linalg_vector_norm.default aten.logsumexp.default", _reduction(""))
# An index counts from the start of the whole dim, and without its value it cannot be compared.
register("aten.argmax.default aten.argmin.default", _reduction(""), differentiable=False)
register("aten.nansum.default", _reduction("sum"))
register(
    """aten.max.dim aten.min.dim aten.aminmax.default aten.kthvalue.default aten.mode.default
    aten.median.default aten.median.dim aten.nanmedian.default aten.nanmedian.dim
    aten.nanmean.default aten.prod.dim_int aten.var.default aten.var.dim aten.std.default
    aten.std.dim aten.var_mean.default aten.var_mean.dim aten.var_mean.correction
    aten.std_mean.default aten.std_mean.dim aten.std_mean.correction aten.norm.Scalar
    aten.norm.ScalarOpt_dim aten.norm.ScalarOpt_dim_dtype aten.norm.ScalarOpt_dtype
    aten.linalg_norm.default aten.linalg_norm.ord_str aten.frobenius_norm.dim
    aten.nuclear_norm.default aten.special_logsumexp.default""",
    lambda call: _reduction("", _LAST.get(call.operator.kind))(call),
)
register(
    """aten.any.default aten.any.dim aten.any.dims aten.all.default aten.all.dim aten.all.dims
    aten._is_all_true.default aten._is_any_true.default aten.count_nonzero.default
    aten.count_nonzero.dim_IntList""",
    _reduction(""),
    differentiable=False,
)
register(
    "aten.linalg_matrix_norm.default aten.linalg_matrix_norm.str_ord", _reduction("", (-2, -1))
)
register(
    "aten.quantile.default aten.quantile.scalar aten.nanquantile.default aten.nanquantile.scalar",
    _quantile,
)
