"""The sharding of an operator in words.

The words tell its strategy, its layouts, and the redistributions around it with their cost.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.analysis.program.account import Account, Move, OperatorAccount
from autopar.analysis.program.equal_layers import module_of
from autopar.analysis.program.layer_names import folded
from autopar.analysis.program.strategy_words import (
    COLLECTIVES,
    gathered,
    strategy_words,
    zero_words,
)
from autopar.errors import UsageError
from autopar.ir import Tensor
from autopar.ir.recipes import recipe_of
from autopar.plan import Plan
from autopar.plan_parts import ParameterPlan
from autopar.report.tables import Table
from autopar.sharding.layout import (
    Kind,
    Layout,
    Placement,
    format_layout,
    local_shape,
    parse_layout,
)
from autopar.sharding.program import Collective
from autopar.units import bytes_text, seconds_text

MOST_NUMBERS = 8
"""The most numbers of a folded name that a table lists."""
BARE = {"R": "replicated", "B": "replicated, gradients as shares", "P": "partial sum passed on"}


def find_operators(names: Sequence[str], wanted: str) -> list[str]:
    """The operators that match `wanted`: a name, a module path, or a glob pattern.

    >>> find_operators(["/h.0/attn/MatMul", "/h.0/attn/Add", "/h.1/attn/MatMul"], "h.0/attn")
    ['/h.0/attn/MatMul', '/h.0/attn/Add']
    """
    if wanted in names:
        return [wanted]
    # PyTorch's exporter begins the names of ONNX nodes with a slash, which users leave out.
    short = wanted.strip("/")
    matches = [
        n
        for n in names
        if short in (n.strip("/"), module_of(n)[0]) or fnmatch.fnmatchcase(n.strip("/"), short)
    ]
    if not matches:
        near = difflib.get_close_matches(
            short, [name.strip("/") for name in names], n=5, cutoff=0.3
        )
        hint = f"nearest are {', '.join(near)}" if near else "none is alike"
        also = f"the plan holds {len(names)}; a module path or a pattern such as '*attn*' works too"
        raise UsageError(f"unknown operator {wanted!r}: {hint} ({also})")
    return matches


def short_name(name: str) -> str:
    """A folded name with the first of many numbers.

    >>> short_name("MatMul_{0..3,7}"), short_name("Add_{1,3,5,7,9,11,13,15,17,19}")
    ('MatMul_{0..3,7}', 'Add_{1,3,5,7,9,11,13,15, and 2 more}')
    """

    def short(braces: re.Match[str]) -> str:
        numbers = braces[1].split(",")
        left = len(numbers) - MOST_NUMBERS
        if left <= 0:
            return braces[0]
        return f"{{{','.join(numbers[:MOST_NUMBERS])}, and {left} more}}"

    return re.sub(r"\{([^{}]*)\}", short, name)


def layout_words(layout: Layout, axes: Sequence[str]) -> str:
    """A layout with its axes named."""
    return ", ".join(
        f"{_placement_words(placement)} over {axis}"
        for placement, axis in zip(layout, axes, strict=True)
    )


def _placement_words(placement: Placement) -> str:
    if placement.kind is Kind.SPLIT:
        return f"dim {placement.dim} split" + (
            f" in each of {placement.parts} parts" if placement.parts > 1 else ""
        )
    words = {
        Kind.REPLICATED: "whole",
        Kind.BROADCAST: "whole (gradient partial)",
        Kind.PARTIAL: f"partial {placement.reduction}",
    }
    return words[placement.kind]


def operator_lines(account: OperatorAccount, whole: Account) -> list[str]:
    """Everything about one operator, as text."""
    op = account.operator
    axes = whole.axes
    mesh = whole.plan.mesh_.shape
    tensors = whole.analysis.graph.tensors
    lines = [f"{op.name} ({op.kind})"]
    for axis, option, words in zip(
        axes, account.decision.options, strategy_words(account, whole), strict=True
    ):
        lines.append(f"  on {axis}: {words} [{option.name}]")
    if account.decision.rule is not None:
        sizes = ", ".join(
            f"{f.name}={f.size}" + ("!" if f.whole else "") for f in account.decision.rule.factors
        )
        lines.append(f"  rule: {account.decision.rule.text}   ({sizes}; ! is never split)")
    if (recipe := recipe_of(op)) is not None:
        copied = ", its values are kept so" if op.attributes.get("keeps_narrow") else ""
        lines.append(f"  reads operands by the recipe {recipe.name}{copied}")
    places = [("in", n, place) for n, place in zip(op.inputs, account.decision.inputs, strict=True)]
    places += [
        ("out", n, place) for n, place in zip(op.outputs, account.decision.outputs, strict=True)
    ]
    for word, name, layout in places:
        lines.append(
            f"  {word:3} {_tensor_text(tensors[name], layout, mesh)}: {format_layout(layout)} "
            f"({layout_words(layout, axes)})"
        )
        if word == "in" and name in whole.plan.parameters:
            lines.append(f"      stored as {stored_words(whole.plan.parameters[name])}")
    for title, moves in (("before", account.before), ("after", account.after)):
        for move in moves:
            lines += _move_lines(title, move, whole)
    if account.inside:
        lines += ["  inside", *_collective_lines(account.inside, whole)]
    return lines


def stored_words(parameter: ParameterPlan) -> str:
    """The storage layout of a parameter, and whether its optimizer state is on the host."""
    return parameter.storage + (
        ", optimizer state in host memory" if parameter.state == "host" else ""
    )


def _tensor_text(tensor: Tensor, layout: Layout, mesh: Sequence[int]) -> str:
    shape, local = (
        " x ".join(map(str, s)) or "scalar"
        for s in (tensor.shape, local_shape(layout, tensor.shape, mesh))
    )
    return f"{tensor.name} {tensor.dtype} {shape}" + (
        f", per device {local}" if local != shape else ""
    )


def _move_lines(title: str, move: Move, whole: Account) -> list[str]:
    chain = " -> ".join(map(format_layout, move.chain))
    lines = [f"  {title} {move.tensor}: {chain}"]
    collectives = _collectives_of(move, whole)
    if move.unit is not None and collectives:
        others = len(whole.units[move.unit].parameters) - 1
        lines.append(
            f"      in unit {move.unit}"
            + (f", with {others} other parameter{'s' if others > 1 else ''}" if others else "")
        )
    lines += _collective_lines(collectives, whole)
    if not collectives:
        lines.append("      no communication")
    if gathered(move, whole):
        lines.append(
            f"      gathered before use: {zero_words(whole)} over "
            f"{', '.join(whole.axes[axis] for axis in gathered(move, whole))}"
        )
    return lines


def _collectives_of(move: Move, whole: Account) -> tuple[tuple[Collective, float], ...]:
    """The collectives of a redistribution; for a parameter, those of its unit."""
    return move.collectives if move.unit is None else whole.units[move.unit].collectives


def _collective_lines(collectives: Iterable[tuple[Collective, float]], whole: Account) -> list[str]:
    """The collectives in lines, equal ones in one line."""
    counts = Counter((c.phase, c.kind, c.axes, c.nbytes, seconds) for c, seconds in collectives)
    lines = []
    for (phase, kind, axes, nbytes, seconds), count in counts.items():
        times = f"{count} x " if count > 1 else ""
        lines.append(
            f"      {phase} {times}{COLLECTIVES[kind]} over {whole.over(axes)}: "
            f"{bytes_text(nbytes)}, {seconds_text(seconds)}"
        )
    return lines


def operator_json(account: OperatorAccount, whole: Account) -> dict[str, Any]:
    """One operator as an object: seconds and bytes."""
    op = account.operator
    tensors = whole.analysis.graph.tensors

    def places(names: Iterable[str], layouts: Iterable[Layout]) -> list[dict[str, Any]]:
        pairs = zip(names, layouts, strict=True)
        return [
            {
                "tensor": n,
                "shape": list(tensors[n].shape),
                "dtype": tensors[n].dtype,
                "layout": format_layout(at),
            }
            for n, at in pairs
        ]

    return {
        "name": op.name,
        "kind": op.kind,
        "strategy": {
            axis: option.name
            for axis, option in zip(whole.axes, account.decision.options, strict=True)
        },
        "words": dict(zip(whole.axes, strategy_words(account, whole), strict=True)),
        "inputs": places(op.inputs, account.decision.inputs),
        "outputs": places(op.outputs, account.decision.outputs),
        "storage": {
            name: whole.plan.parameters[name].storage
            for name in op.inputs
            if name in whole.plan.parameters
        },
        "state": {
            name: whole.plan.parameters[name].state
            for name in op.inputs
            if name in whole.plan.parameters
        },
        "before": [_move_json(move, whole) for move in account.before],
        "after": [_move_json(move, whole) for move in account.after],
        "inside": _collectives_json(account.inside, whole),
    }


def _collectives_json(
    collectives: Iterable[tuple[Collective, float]], whole: Account
) -> list[dict[str, Any]]:
    return [
        {
            "phase": c.phase,
            "kind": c.kind,
            "axis": whole.over(c.axes),
            "bytes": c.nbytes,
            "seconds": seconds,
        }
        for c, seconds in collectives
    ]


def _move_json(move: Move, whole: Account) -> dict[str, Any]:
    return {
        "tensor": move.tensor,
        "chain": [format_layout(layout) for layout in move.chain],
        "unit": move.unit,
        "collectives": _collectives_json(_collectives_of(move, whole), whole),
        "reduced_as_stored": [whole.over(axes) for axes in move.reduced_later],
    }


def bare_table(plan: Plan, names: Iterable[str]) -> Table:
    """Operators from the plan file alone: the factor that each axis splits."""
    # Stages may have fewer axes than others.
    mesh = max((plan.mesh, *(stage.mesh for stage in plan.stages)), key=len)
    axes = [axis.name for axis in mesh]

    def row(name: str) -> tuple[str, ...]:
        held = plan.operators[name]
        lacks = ("",) * (len(axes) - len(held.strategy))
        return (name.strip("/"), held.kind, *held.strategy, *lacks)

    rows_folded = folded(map(row, names))
    rows = tuple((short_name(cells[0]), str(count), *cells[1:]) for count, cells in rows_folded)
    title = "Operators: the factor that each axis splits (R, B: none; P: a partial sum passes)"
    return Table(title=title, columns=("operators", ">ops", "kind", *axes), rows=rows)


def bare_lines(plan: Plan, name: str) -> list[str]:
    """One operator from the plan file alone: its strategy, and layouts under its name."""
    axes = [axis.name for axis in plan.meshes()[name]]
    lines = [f"{name} ({plan.operators[name].kind})"]
    for axis, option in zip(axes, plan.operators[name].strategy, strict=True):
        lines.append(f"  on {axis}: {BARE.get(option, f'splits {option}')} [{option}]")
    for word, places in (
        ("in", plan.operators[name].inputs),
        ("out", plan.operators[name].outputs),
    ):
        for tensor, layout in places:
            lines.append(
                f"  {word:3} {tensor}: {layout} ({layout_words(parse_layout(layout), axes)})"
            )
            if tensor in plan.parameters:
                held = plan.parameters[tensor]
                lines.append(
                    f"      a parameter, {held.dtype} {' x '.join(map(str, held.shape))}, stored "
                    f"as {stored_words(held)}"
                )
            lines += bare_chains(plan, tensor)
    return lines


def bare_chains(plan: Plan, tensor: str) -> list[str]:
    """All redistributions of a tensor, for all readers, and their collectives."""
    lines = [
        f"      redistributed {' -> '.join(chain)}"
        for chain in plan.redistributions.get(tensor, ())
    ]
    for c in plan.collectives:
        if c.tensor == tensor:
            kind = COLLECTIVES.get(c.kind, c.kind)
            lines.append(
                f"      {c.phase} {kind} over {c.axis}: {bytes_text(c.nbytes)}, "
                f"{seconds_text(c.seconds)}"
            )
    return lines


def storage_table(plan: Plan) -> Table:
    """The parameters of the plan file."""
    rows_folded = folded(
        (name, p.dtype, " x ".join(map(str, p.shape)), stored_words(p))
        for name, p in plan.parameters.items()
    )
    rows = tuple((short_name(row[0]), str(count), *row[1:]) for count, row in rows_folded)
    axes = " ".join(axis.name for axis in plan.mesh)
    return Table(
        title=f"Parameters: storage layout on {axes}",
        columns=("parameters", ">each", "dtype", "shape", "storage"),
        rows=rows,
    )
