"""The model of a command line, and checks of the other arguments before it is read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.errors import UsageError
from autopar.options.table import READING
from autopar.printable import printable

from .shared_options import planning_values

if TYPE_CHECKING:
    from autopar.model import LoadedModel
    from autopar.plan import Plan

SIZING = (
    *("batch", "seq", "image", "frames", "dims", "shapes", "dtype", "precision"),
    *("frozen", "trained", "values", "outputs"),
)
"""The options that make a model another than the one of a loaded plan."""


def check_words(args: argparse.Namespace, schemes: Sequence[str]) -> None:
    """Check memory, schemes, pins and cluster before the model is read, which may take long."""
    from autopar.costmodel.frameworks import target_named
    from autopar.options.plan_options import choose_cluster
    from autopar.planning.model.pins import parse_pin
    from autopar.schemes import scheme_named

    planning_values(args, ["memory"])
    for name in schemes:
        scheme_named(name)
    for text in getattr(args, "pins", ()):
        parse_pin(text)
    if args.cluster or args.devices is not None:
        choose_cluster(args.cluster, args.devices)
    if args.target is not None:
        target_named(args.target)


def load_asked(args: argparse.Namespace) -> LoadedModel:
    """The model with the requested sizes; by default those of the loaded plan, if there is one."""
    from autopar.configured import load_any
    from autopar.frontends.huggingface import OPTIONS, PREFIX
    from autopar.frontends.load import options_asked

    for name in ("batch", "devices"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    earlier = getattr(args, "load", None)
    if earlier and not any(getattr(args, name) for name in SIZING):
        from autopar.plan import Plan
        from autopar.plan_origin import model_of_plan

        return model_of_plan(args.model, Plan.load(earlier), loss=args.loss, trust=args.trust)
    reading = planning_values(args, READING)
    for name, dim in OPTIONS.items():
        if (size := getattr(args, name)) is None:
            continue
        if not args.model.startswith(PREFIX):
            raise UsageError(
                f"--{name} applies to {PREFIX} models; other models take --dim NAME=SIZE, "
                "or the sizes of their example inputs"
            )
        reading["dims"][dim] = size
    return load_any(args.model, options_asked(**reading, train=args.mode == "train"))


def warn_replicated(plan: Plan) -> None:
    """Name the operators without a rule, which every device computes whole, on stderr."""
    if plan.replicated:
        named = printable(", ".join(plan.replicated), lines=False)
        print(
            f"autopar: every device computes all of {named}: no rule says how to split it",
            file=sys.stderr,
        )
