"""Figures of the whole model's operators from a folded solution, and the balance of its stages."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from autopar.planning.model import FoldedModel
from autopar.planning.tables import Tables
from autopar.search import Solution, least_bottleneck

from .operator_costs import NUMBERS, OperatorCosts


def imbalance(folded: FoldedModel, tables: Tables, solution: Solution, stages: int) -> float:
    """Return the least ratio of the slowest of so many stages to their mean.

    It counts the operators' own seconds under a solution of the folded graph's tables, and cuts
    only where the model hands on few bytes.
    """
    if stages == 1:
        return 1.0
    counts = folded.counts.operators
    own = {
        variable.name: float(unary[choice]) / counts[variable.name]
        for variable, unary, choice in zip(
            tables.variables, tables.graph.unary, solution.choices, strict=True
        )
        if variable.what == "operator"
    }
    representatives = folded.folding.operators
    seconds = np.array([own.get(representatives[op.name], 0.0) for op in folded.graph.operators])
    # Stages end at good cuts, so their seconds are sums of whole pieces.
    pieces = np.add.reduceat(seconds, folded.cuts)
    return max(least_bottleneck(pieces, stages) * stages / float(seconds.sum()), 1.0)


def expand(folded: FoldedModel, figures: OperatorCosts) -> OperatorCosts:
    """Return the figures of the whole model's operators from those of the folded graph's."""
    place = {op.name: number for number, op in enumerate(folded.folding.graph.operators)}
    representatives = folded.folding.operators
    source = np.array([place[representatives[op.name]] for op in folded.graph.operators])
    arrays = (f.name for f in fields(figures) if f.name not in ("handed", *NUMBERS))
    whole = {name: getattr(figures, name)[source] for name in arrays}
    return replace(figures, **whole, handed=figures.handed[np.append(source, len(place))])
