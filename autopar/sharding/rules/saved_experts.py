"""Tensors that autograd keeps of a layer of experts, call by call inside it, and temporaries of its
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES, Operator, Ref, Tensor, Value

from .experts import BIAS, EXPERTS, Inner, Result, network_of, rows_of
from .registry import Call
from .saved_for_backward import OWN, Keeps, Made, Own, Saving, keeps, shares_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A call inside: the values that it reads and makes, and the values whose memory it keeps."""

    takes: tuple[str, ...]
    makes: tuple[str, ...]
    keeps: tuple[str, ...]


def _steps(
    call: Call, gradients: Sequence[bool], saving: Saving
) -> tuple[list[_Step], Mapping[str, Result]]:
    """The calls inside, and width, type and dims of their values."""
    values = {"%rows": Result(width=call.inputs[0].shape[1], dtype=call.inputs[0].dtype, dims="!h")}
    roots: dict[str, str] = {}
    products: set[str] = set()
    steps = []
    for inner in network_of(call):
        makes = [f"%{len(values) - 1 + i}" for i in range(len(inner.results))]
        values.update(zip(makes, inner.results, strict=True))
        # A bias is selected by index and then added: neither keeps values.
        if inner.kind == BIAS:
            continue
        takes = [name for name in inner.given if name != "%ends"]
        given = _inside(call, inner, takes, values)
        if shares_memory(given, contiguous=True):
            roots.update(dict.fromkeys(makes, roots.get(takes[0], takes[0])))
        wanted = keeps(
            given, tuple(not n.startswith("%w") or gradients[2 + int(n[2:])] for n in takes), saving
        )
        saved = [takes[i] for i in wanted.inputs] + [makes[i] for i in wanted.outputs]
        if any(name.startswith("%w") for name in takes):
            products.update(makes)
        elif saving.fused:
            # One kernel from product to product keeps what the first has made.
            saved = [name for name in takes if roots.get(name, name) in products]
        steps.append(
            _Step(
                takes=tuple(takes),
                makes=tuple(makes),
                keeps=tuple(roots.get(name, name) for name in saved),
            )
        )
    return steps, values


def _inside(call: Call, inner: Inner, takes: list[str], values: Mapping[str, Result]) -> Call:
    """A call inside an expert, on all rows."""
    attributes: dict[str, Value] = {
        name: Ref(takes.index(value)) if isinstance(value, str) and value in takes else value
        for name, value in inner.arguments.items()
        if value != "%ends"
    }
    rows = rows_of(call)

    def tensor(name: str, result: Result) -> Tensor:
        return Tensor(name=name, shape=(rows, result.width), dtype=result.dtype)

    operator = Operator(
        name=inner.kind, kind=inner.kind, inputs=tuple(takes), outputs=(), attributes=attributes
    )
    inputs = tuple(
        call.inputs[2 + int(n[2:])] if n.startswith("%w") else tensor(n, values[n]) for n in takes
    )
    return Call(
        operator=operator,
        inputs=inputs,
        outputs=tuple(tensor(str(i), result) for i, result in enumerate(inner.results)),
    )


def _row_bytes(result: Result) -> float:
    return float(result.width * DTYPE_BYTES[result.dtype])


def _made(call: Call, nbytes: float, *, inner: bool) -> Made:
    """`nbytes` for each row; a rank has the rows of its experts."""
    factors = ("e", "f") if inner else ("e",)
    results = call.outputs[0].shape
    each = nbytes * rows_of(call) / max(results[0] * results[1], 1)
    return Made(output=True, position=0, nbytes=each, factors=factors)


def _keeps(call: Call, gradients: Sequence[bool], saving: Saving) -> Keeps:
    """The weights, the sorted rows, results, each memory once; and where each row went."""
    steps, values = _steps(call, gradients, saving)
    saved = dict.fromkeys(name for step in steps for name in step.keeps)
    scores = call.position("scores")
    # The gradients of scores are those of the sums times the results.
    if scores is not None and gradients[scores] and not saving.fused:
        saved[steps[-1].makes[0]] = None
    weights = tuple(sorted(2 + int(name[2:]) for name in saved if name.startswith("%w")))
    made = [
        _made(call, _row_bytes(values[name]), inner=values[name].inner)
        for name in saved
        if name in values
    ]
    # A row's score, and two indices, of sorting the rows by expert and of undoing it.
    own = 2.0 * DTYPE_BYTES["int64"]
    if scores is not None:
        own += DTYPE_BYTES[call.inputs[scores].dtype]
    return Keeps(inputs=weights, made=(*made, _made(call, own, inner=False)))


def _scratch(call: Call, saving: Saving) -> tuple[Made, ...]:
    """The largest excess of live gradients over the saved tensors that are no longer needed.

    scratch = max over the calls, from last to first, of (gradients alive + saved by it and the
    calls before it) - saved by all
    """
    # All weights count as trained, which is the most that can be alive.
    steps, values = _steps(call, [True] * len(call.inputs), saving)
    alive = {steps[-1].makes[0]}
    saved = [name for step in steps for name in step.keeps if name in values]
    most = 0.0
    for number, step in reversed(list(enumerate(steps))):
        alive.update(name for name in (*step.takes, *step.makes) if name in values)
        needed = {
            name for earlier in steps[: number + 1] for name in earlier.keeps if name in values
        }
        gradients = sum(_row_bytes(values[name]) for name in alive)
        most = max(most, gradients - sum(_row_bytes(values[name]) for name in set(saved) - needed))
        alive.difference_update(step.makes)
    return (_made(call, most, inner=any(result.inner for result in values.values())),)


OWN[EXPERTS] = Own(keeps=_keeps, scratch=_scratch)
