"""Strategies in words: the work of an operator on each mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.schemes.meanings import Meanings
from autopar.schemes.naming import zero_of
from autopar.sharding.analysis import Offer
from autopar.sharding.layout import Kind, parse_layout
from autopar.sharding.notation import ONCE
from autopar.sharding.rules import RULES
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.strategies import Option

if TYPE_CHECKING:
    from .account import Account, Move, OperatorAccount

COLUMN = "column-parallel"
ROW = "row-parallel"
EXPERT = "expert-parallel"
EXPERT_ONCE = "expert-parallel (a row once to each place)"
WHOLE = "replicated"
PARTIAL = "partial sum passed on"
SPATIAL = "spatial-parallel (halo exchange)"
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send": "send",
}
CONTEXT = "context-parallel (ring attention)"


def option_words(
    name: str, offer: Offer, option: Option, inputs: tuple[str, ...], meanings: Meanings
) -> str:
    """The work of an operator on one axis, in words."""
    if option.factor < 0:
        return PARTIAL if any(p.kind is Kind.PARTIAL for p in option.outputs) else WHOLE
    if option.communication == "halo":
        return SPATIAL
    word = meanings.factors[name][option.factor][0]
    entry = RULES[offer.call.operator.kind]
    held = [tensor in meanings.weights for tensor in inputs]
    split = [placement.kind is Kind.SPLIT for placement in option.inputs]
    if way := offer.way_of_rows(option):
        return EXPERT_ONCE if way == ONCE else EXPERT
    if entry.products and any(held) and not all(held):
        by_weight = any(s for s, h in zip(split, held, strict=True) if h)
        by_value = any(s for s, h in zip(split, held, strict=True) if not h)
        output_split = any(p.kind is Kind.SPLIT for p in option.outputs)
        if by_weight and offer.call.operator.kind == EXPERTS:
            return f"{COLUMN}, then {ROW}"
        if by_weight and not output_split:
            return ROW
        if by_weight:
            return EXPERT if by_value else COLUMN
    if option.communication == "ring":
        return CONTEXT
    if (
        offer.rule.factors[option.factor].special == "masked"
        or option.communication == "vocabulary"
    ):
        return "vocabulary-parallel"
    return word if option.communication is None else f"{word} ({option.communication})"


def strategy_words(account: OperatorAccount, whole: Account) -> tuple[str, ...]:
    """The work of an operator on each mesh axis, in words."""
    offer = whole.analysis.offers[account.operator.name]
    inputs = account.operator.inputs
    return tuple(
        option_words(account.operator.name, offer, option, inputs, whole.meanings)
        for option in account.decision.options
    )


def phrase(
    account: OperatorAccount, whole: Account, followers: Sequence[OperatorAccount] = ()
) -> str:
    """The strategy of an operator as a phrase.

    The reductions of its `followers` (its bias) count as its own.
    """
    members = [account, *followers]
    over: dict[str, list[int]] = {}
    for axis, word in enumerate(strategy_words(account, whole)):
        over.setdefault(word, []).append(axis)
    parts = [_part(word, axes, members, whole) for word, axes in over.items() if word != WHOLE] or [
        WHOLE
    ]
    stored = sorted({axis for move in account.before for axis in gathered(move, whole)})
    if stored:
        parts.append(f"{zero_words(whole)} over {', '.join(whole.axes[axis] for axis in stored)}")
    return "; ".join(parts)


def _part(word: str, axes: list[int], members: Sequence[OperatorAccount], whole: Account) -> str:
    moves = [move for account in members for move in account.after]
    kinds = {
        c.kind
        for move in moves
        for c, _ in move.collectives
        if c.phase == "forward" and set(c.axes) <= set(axes)
    }
    tail = f" ({', '.join(COLLECTIVES[kind] for kind in sorted(kinds))})" if kinds else ""
    return f"{word} over {', '.join(whole.axes[axis] for axis in axes)}{tail}"


def gathered(move: Move, whole: Account) -> list[int]:
    """The axes on which a parameter is stored split and gathered before use."""
    if move.tensor not in whole.plan.parameters:
        return []
    ends = enumerate(zip(move.chain[0], move.chain[-1], strict=True))
    return [
        axis
        for axis, (stored, used) in ends
        if stored.kind is Kind.SPLIT and used.kind in (Kind.REPLICATED, Kind.BROADCAST)
    ]


def zero_words(whole: Account) -> str:
    """The use of parameters that are stored split, in words."""
    return f"ZeRO-{zero_of(whole.plan, train=whole.analysis.train)} storage"


def idle_axes(whole: Account) -> list[str]:
    """The axes whose devices repeat each other's work, because nothing is split on them."""
    used = {
        axis
        for account in whole.operators
        for axis, option in enumerate(account.decision.options)
        if option.factor >= 0
    }
    layouts = [parse_layout(parameter.storage) for parameter in whole.plan.parameters.values()]
    used |= {
        axis
        for layout in layouts
        for axis, placement in enumerate(layout)
        if placement.kind is Kind.SPLIT
    }
    return [
        axis.name
        for index, axis in enumerate(whole.plan.mesh)
        if axis.size > 1 and index not in used
    ]


def is_product(account: OperatorAccount, whole: Account) -> bool:
    """Whether the operator multiplies by a weight."""
    held = [name in whole.meanings.weights for name in account.operator.inputs]
    return bool(RULES[account.operator.kind].products) and any(held) and not all(held)
