"""A plan in a few sentences, as text and for notebooks."""

from __future__ import annotations

from html import escape

from autopar.plan import Plan
from autopar.plan_origin import known_cluster
from autopar.printable import printable

from .tables import summary_lines


def summary(plan: Plan) -> str:
    """The main figures of a plan: mesh, seconds, bytes, gap, schedule."""
    cluster = known_cluster(plan, None)
    return printable("\n".join(summary_lines(plan, f"cluster {plan.cluster}", cluster=cluster)))


def html(plan: Plan) -> str:
    """The main figures as a table, for notebooks."""
    pairs = [line.partition(" ") for line in summary(plan).splitlines()]
    left = 'style="text-align:left"'
    rows = "".join(
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(said)}</td></tr>"
        for name, _, said in pairs
    )
    return f"<table>{rows}</table>"
