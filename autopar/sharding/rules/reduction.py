"""Rules of reductions: a split reduced dim leaves a partial sum (or mean, maximum, minimum)."""

from __future__ import annotations

from collections.abc import Callable

from .registry import Call, register

_DIMS = ("dim", "axes", "axis")


def _reduction(operation: str) -> Callable[[Call], str]:
    def rule(call: Call) -> str:
        shape = call.inputs[0].shape
        empty_is_noop = bool(call.get("noop_with_empty_axes", default=0)) and call.get(*_DIMS) in (None, ())
        dims = () if empty_is_noop else call.dims(len(shape), *_DIMS)
        whole = "" if operation else "!"
        keep = len(call.outputs[0].shape) == len(shape)
        ins = [f"{whole if i in dims else ''}d{i}" for i in range(len(shape))]
        outs = ["1" if i in dims else f"d{i}" for i in range(len(shape)) if keep or i not in dims]
        tail = f" | {', '.join(f'd{i}' for i in dims)}: {operation}" if operation and dims else ""
        return f"{' '.join(ins)} -> {' '.join(outs)}{tail}"

    return rule


register("aten.sum.default aten.sum.dim_IntList onnx.ReduceSum", _reduction("sum"), linear=((0,),))
register("aten.mean.default aten.mean.dim onnx.ReduceMean", _reduction("mean"), linear=((0,),))
register("aten.amax.default aten.max.default onnx.ReduceMax", _reduction("max"))
register("aten.amin.default aten.min.default onnx.ReduceMin", _reduction("min"))
register("onnx.ReduceSumSquare autopar.mean_square", _reduction("sum"))
register(
    "aten.prod.default aten.var.correction aten.std.correction onnx.ReduceProd onnx.ReduceL2 onnx.ReduceL1 onnx.ReduceLogSumExp",
    _reduction(""),
)
register("aten.linalg_vector_norm.default aten.logsumexp.default", _reduction(""))
register("aten.argmax.default aten.argmin.default onnx.ArgMax onnx.ArgMin", _reduction(""), differentiable=False)
