"""Rules of mixtures of experts: layers of experts, and single products of rows that are sorted by
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir import Value
from autopar.ir.stored_products import EXPERTS as EXPERTS

from ..notation import ONCE
from .narrow_products import blocked_experts
from .registry import Call, register

GROUPED = "t k, e k n, !f -> t n | k: sum; e: masked; e: sum; e + t: dispatch"
"""Rows split: each rank works with all weights on its rows. Experts split: each rank works on the
rows of its experts and gives zeros for the others; with the rows split too, rows travel to their
experts and back.
"""


def has_experts(kind: str) -> bool:
    """Whether an operator of this kind has a matrix for each expert."""
    return kind == EXPERTS or "grouped_mm" in kind


PRODUCTS: Mapping[str, tuple[str, str]] = {
    "transformers.grouped_mm_fallback.default": ("input", "weight"),
    "aten._grouped_mm.default": ("self", "mat2"),
}
"""Grouped products, with the names of their rows and weights."""
# The experts' bias enters as the rows of a table: one row is selected for each token's expert.
BIAS = "aten.index_select.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a call inside an expert, for every row: `width` columns, `dims` as a rule
    spells them.
    """

    width: int
    dtype: str
    dims: str

    @property
    def inner(self) -> bool:
        """Whether the columns are split with the inner dim."""
        return "f" in self.dims.replace(")", " ").split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A call inside an expert; in its arguments `%rows`, `%w0` (an operand) and `%0` (a result)
    mean values.
    """

    kind: str
    arguments: Mapping[str, Value]
    results: tuple[Result, ...]

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the values that the call reads."""
        return tuple(
            value
            for value in self.arguments.values()
            if isinstance(value, str) and value.startswith("%")
        )


def network_of(call: Call) -> tuple[Inner, ...]:
    """The calls that each expert of a layer makes, in order."""
    network: Any = call.get("network")
    return tuple(
        Inner(
            kind=kind,
            arguments=dict(arguments),
            results=tuple(Result(width=w, dtype=t, dims=d) for w, t, d in results),
        )
        for kind, arguments, results in network
    )


def rows_of(call: Call) -> int:
    """The number of rows that a layer's experts work on."""
    chosen = call.position("chosen")
    return call.inputs[0 if chosen is None else chosen].shape[0]


def per_token(call: Call) -> int:
    """The number of experts that each token goes to."""
    return rows_of(call) // max(call.inputs[0].shape[0], 1)


def is_weighed(call: Call) -> bool:
    """Whether a layer weighs the results of a token by scores and adds them up."""
    return call.position("scores") is not None


def is_biased(call: Call) -> bool:
    """Whether the results of a layer have biases of their own."""
    return any(one.kind == BIAS and one.results[0].dims == "!o" for one in network_of(call))


def is_turned(call: Call, operand: int) -> bool:
    """Whether a layer reads the matrices of an operand transposed."""
    turned: Any = call.get("turned", default=())
    return bool(operand in turned)


def result_of(call: Call) -> Result:
    """The result of a row."""
    return network_of(call)[-1].results[-1]


def multiply_adds(call: Call) -> int:
    """Multiply-adds of a layer's products, for all rows."""
    widths = {"%rows": call.inputs[0].shape[1]}
    total = 0
    for inner in network_of(call):
        if inner.kind in PRODUCTS:
            total += (
                rows_of(call)
                * widths[str(inner.arguments[PRODUCTS[inner.kind][0]])]
                * inner.results[0].width
            )
        for result in inner.results:
            widths[f"%{len(widths) - 1}"] = result.width
    return total


def _experts(call: Call) -> str:
    """Tokens [t, h], the expert of each of their k rows, weights; the results [t k, o].

    Tokens split: each rank takes its tokens through all experts. Inner dim f split: the products
    with the last weights leave partial sums. Experts split: as a grouped product. With scores
    [t k] the results [t, o] are sums of weighed rows, and these can be made where the experts are,
    so that what travels is a row for each place and not for each expert.
    """
    # The k rows of a token stay together, so a split of rows is one of tokens.
    k = per_token(call)
    rows = "t" if k == 1 else f"(t !k={k})"
    scored = is_weighed(call)
    once = f"; e + t: {ONCE}" * (scored and k > 1)
    operands: dict[int, str] = {}
    dims = {"%rows": "!h"}
    count = 0
    for inner in network_of(call):
        made = inner.results[0].dims
        for name in (name for name in inner.given if name.startswith("%w")):
            taken = (
                ""
                if inner.kind == BIAS
                else dims[str(inner.arguments[PRODUCTS[inner.kind][0]])] + " "
            )
            # The bias of the results is added to partial sums over f, so it may come once only.
            addend = "+" * (inner.kind == BIAS and made == "!o")
            turned = is_turned(call, int(name[2:]))
            matrix = f"{made} {taken}".strip() if turned else f"{taken}{made}"
            operands[int(name[2:])] = f"{addend}e {matrix}"
        for result in inner.results:
            dims[f"%{count}"] = result.dims
            count += 1
    second = rows if call.position("chosen") is not None else "!n"
    sides = ", ".join(["t !h", second, *(operands[i] for i in sorted(operands)), *[rows] * scored])
    results = "t" if scored else rows
    inside = "; f: sum" * any(
        result.inner for inner in network_of(call) for result in inner.results
    )
    text = f"{sides} -> {results} !o | e: masked; e: sum; e + t: dispatch{once}{inside}"
    return blocked_experts(call, text, _inner_size(call))


def _inner_size(call: Call) -> int:
    """The size of the inner dim f where a value has it alone, else 0."""
    results = [result for inner in network_of(call) for result in inner.results]
    return next((result.width for result in results if result.dims == "f"), 0)


# "/e": a row meets the weights of one expert, so an expert's share of the work is that of its rows.
register("transformers.grouped_mm_fallback.default", GROUPED, linear=((0,), (1,)), products=("/e",))
register(EXPERTS, _experts, products=("/e",))
