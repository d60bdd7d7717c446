"""The report's reasons for strategies.

A product of each kind of layer is shown with its candidates, prices and main reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.analysis.searches.alternatives import Alternative, Why
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.report.explain.answers import signed
from autopar.report.tables import Table
from autopar.sharding.rules import RULES
from autopar.units import seconds_text

from .modules import Leaf, Tree
from .section import Section

MOST_OPERATORS = 24
"""The most rows of the tree to explain; the plan is solved again for each strategy of a row."""
MOST_CANDIDATES = 12
"""The most candidates in a table."""
NEGLIGIBLE = 1e-4
"""The largest difference that counts as none, as a share of the step."""
Reason = tuple[Leaf, list[Alternative]]


def asked(tree: Tree) -> list[Leaf]:
    """The rows of the tree with products, which have most of the work.

    They are all rows if there is no product.
    """
    products = [leaf for leaf in tree.leaves if leaf.kind in RULES and RULES[leaf.kind].products]
    return (products or list(tree.leaves))[:MOST_OPERATORS]


def reasons(tree: Tree, why: Why, progress: Progress | None = None) -> list[Reason]:
    """The candidates of each row's first operator."""
    answers = []
    leaves = asked(tree)
    for number, leaf in enumerate(leaves):
        if progress:
            progress(number, len(leaves), leaf.name)
        answers.append((leaf, why.alternatives(leaf.members[0])))
    return answers


def why_section(plan: Plan, answers: Sequence[Reason]) -> Section:
    """The section of the reasons."""
    told = [
        "One operator of each row is forced to every strategy that it could have, and everything "
        "else is solved again; "
        "of a strategy that is dearer, the last column says where the seconds come from.",
        *(sentence(plan, leaf, others) for leaf, others in answers),
    ]
    return Section(
        anchor="why",
        title="Why it is split so",
        told=tuple(told),
        tables=tuple(_table(plan, *pair) for pair in answers),
    )


def sentence(plan: Plan, leaf: Leaf, others: Sequence[Alternative]) -> str:
    """The reason against the operator's next best strategy."""
    name = leaf.members[0].strip("/")
    rivals = [other for other in others if not other.planned and other.change is not None]
    if not rivals:
        return f"{name}: no other strategy was possible."
    best = min(rivals, key=lambda other: other.change or 0.0)
    words = "; ".join(f"{axis} {word}" for axis, word in best.words.items())
    share = (best.change or 0.0) / plan.predicted.step if plan.predicted.step > 0 else 0.0
    if share < NEGLIGIBLE:
        return f"{name}: {words} would be as fast."
    return f"{name}: the next best ({words}) makes a step {share:.2%} longer: {_cause(best)}."


def _cause(other: Alternative) -> str:
    """The largest part of a change, in words."""
    moves = (other.change or 0.0) - other.own - other.others
    said = {
        "the operator itself computes or communicates more": other.own,
        "other operators and parameters pay": other.others,
    }
    first = f", most of all {other.moves[0].tensor}" if other.moves else ""
    said[f"redistributions cost more{first}"] = moves
    return max(said, key=lambda word: said[word])


def _table(plan: Plan, leaf: Leaf, others: Sequence[Alternative]) -> Table:
    axes = [axis.name for axis in plan.mesh]
    rows = tuple(_row(other, axes, plan.predicted.step) for other in others[:MOST_CANDIDATES])
    left = len(others) - len(rows)
    more = f"; {left} dearer ones are left out" if left > 0 else ""
    several = f", for {leaf.count} alike" if leaf.count > 1 else ""
    title = f"{leaf.members[0].strip('/')}{several}: {len(others)} strategies{more}"
    return Table(
        title=title, columns=(*axes, "what it does", ">change of a step", "made of"), rows=rows
    )


def _row(other: Alternative, axes: Sequence[str], step: float) -> tuple[str, ...]:
    words = ", ".join(dict.fromkeys(other.words.values())) + (
        " (as planned)" if other.planned else ""
    )
    strategy = tuple(other.strategy[axis] for axis in axes)
    if other.change is None:
        return (*strategy, words, other.why, "")
    moves = other.change - other.own - other.others
    parts = (("operator", other.own), ("others", other.others), ("redistributions", moves))
    told = [
        f"{name} {signed(seconds)}" for name, seconds in parts if abs(seconds) > NEGLIGIBLE * step
    ]
    return (
        *strategy,
        words,
        f"+{seconds_text(other.change)} ({other.change / step:+.2%})" if step > 0 else "",
        ", ".join(told),
    )
