"""The options of an operator on the axis of time, where micro-batches get nothing of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from .candidates import can_be_partial
from .communication import COMMUNICATIONS
from .layout import B, Kind, P, Placement, R
from .notation import Dims, Rule
from .rules import RULES, Call
from .strategies import Option


def silent(call: Call, options: Iterable[Option]) -> Iterator[Option]:
    """The options with which parts of the batch need nothing of each other."""
    for option in options:
        if option.communication is None:
            yield option
        elif COMMUNICATIONS[option.communication].own(call):
            yield replace(option, communication=None)


def affine(call: Call) -> Iterator[Option]:
    """The option with which shares of a sum pass through additions of any number of operands.

    On an axis of devices the sum is as well made before them, so no search has it.
    """
    if RULES[call.operator.kind].affine and all(map(can_be_partial, (*call.inputs, *call.outputs))):
        ins = (P,) * len(call.inputs)
        outs = (P,) * len(call.outputs)
        yield Option(name="P", factor=-1, parts=1, inputs=ins, outputs=outs)


def factor_of(split: tuple[int, int], dims: Dims, rule: Rule) -> tuple[int, int] | None:
    """The factor along which a split (dim, parts) of a tensor cuts, and its parts (None: none).

    The parts cut all terms outside of it into single elements, and this term into what is left of
    them.
    """
    dim, parts = split
    outside = 1
    for factor in dims[dim]:
        size = rule.factors[factor].size
        if parts % outside == 0 and parts // outside < size and size % (parts // outside) == 0:
            return factor, parts // outside
        outside *= size
    return None


class Coming(NamedTuple):
    """How an input comes: its placement (None: whole, to be cut where it is read).

    `source`: whether it is made outside of the micro-batches. `sampled`: whether of samples.
    """

    placement: Placement | None
    source: bool
    sampled: bool


def fits(wanted: Placement, come: Coming) -> bool:
    """Whether an input may be read as `wanted` without communication between micro-batches."""
    # Of what every micro-batch has whole, each takes its share of a sum.
    if wanted == P and come.placement in (None, R, B):
        return not come.sampled
    # Such a source is whole on every device, so reading a part of it is a slice.
    if come.source and come.placement is None:
        return wanted == R or wanted.kind is Kind.SPLIT
    return wanted == come.placement
