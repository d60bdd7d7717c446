"""The model of a command line, and checks of the other arguments before it is read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from .options import pair_of, size_of, sizes_of
from .units import parse_bytes

if TYPE_CHECKING:
    from ..model import LoadedModel


def check_words(args: argparse.Namespace, schemes: Sequence[str]) -> None:
    """Check the cluster, the memory, schemes and pins before the model is read, which may take long."""
    from ..plan_options import choose_cluster
    from ..planning.pins import parse_pin
    from ..schemes import scheme_named

    if args.memory:
        parse_bytes(args.memory, "--memory")
    for name in schemes:
        scheme_named(name)
    for text in getattr(args, "pin", ()):
        parse_pin(text)
    if args.cluster or args.devices is not None:
        choose_cluster(args.cluster, args.devices)


def load_asked(args: argparse.Namespace) -> LoadedModel:
    """The model with the requested sizes; by default those of the loaded plan, if there is one."""
    from ..configured import PREFIX, SEQUENCE, load_any
    from ..frontends.load import ModelOptions

    for name in ("batch", "devices"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if getattr(args, "strategy_load", None) and not (args.batch or args.dim or args.shape or args.dtype or args.frozen or args.trained):
        from ..plan import Plan
        from ..plan_origin import model_of_plan

        return model_of_plan(args.model, Plan.load(args.strategy_load), loss=args.loss, trust=args.trust)
    dims = {name: size_of(size, f"--dim {name}") for name, size in (pair_of(text, "--dim", "NAME=SIZE") for text in args.dim)}
    if args.seq is not None:
        if not args.model.startswith(PREFIX):
            raise UsageError(f"--seq applies to {PREFIX} models; other models take --dim NAME=SIZE, or the sizes of their example inputs")
        dims[SEQUENCE] = args.seq
    shapes = {name: sizes_of(size, f"--shape {name}") for name, size in (pair_of(text, "--shape", "INPUT=1x30") for text in args.shape)}
    options = ModelOptions(
        dims=dims, shapes=shapes, batch=args.batch, dtype=args.dtype, loss=args.loss, train=args.mode == "train",
        frozen=args.frozen, trained=args.trained, trust=args.trust,
    )  # fmt: skip
    return load_any(args.model, options)
