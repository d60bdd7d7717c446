"""Options that several commands share: those of planning, from their table, and a few others."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.errors import UsageError, unknown
from autopar.options.option import Option
from autopar.options.table import TABLE
from autopar.units import parse_count

if TYPE_CHECKING:
    from autopar.analysis.program.throughput import Budget

FORMATS = ("torchtitan", "megatron", "megatron-bridge", "deepspeed", "accelerate", "transformers")
BACKENDS = ("gloo", "nccl")
MODELS = (
    "file.onnx, file.pt2, package.module:function returning (module, example_inputs), "
    "or hf:config.json of transformers or diffusers"
)


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise `UsageError` about a value that is no choice, with the valid ones."""
        if action.choices is not None and value not in action.choices:
            named = action.option_strings[-1:] or [str(action.metavar or action.dest).lower()]
            raise UsageError(unknown(named[0], value, action.choices))


class _Older(argparse.Action):
    """An option by its spelling of before, which says the one that it has now."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(f"autopar: {option_string} is now {TABLE[self.dest].spelled}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def planning_options(parser: Parser, options: Iterable[Option]) -> None:
    """Add options of planning as their table has them."""
    for option in options:
        planning_option(parser, option.name)


def planning_option(parser: Parser, name: str, **changes: Any) -> None:
    """Add an option of planning.

    `changes`: arguments of argparse, such as a help text of the command's own.
    """
    option = TABLE[name]
    arguments = {"dest": name, "help": option.help, **option.kind.arguments}
    if option.default:
        arguments["default"] = option.default
    if option.choices:
        arguments["choices"] = option.choices
    if option.metavar:
        arguments["metavar"] = option.metavar
    parser.add_argument(option.spelled, **(arguments | changes))
    if option.older:
        hidden = arguments | {"help": argparse.SUPPRESS, "action": _Older}
        parser.add_argument(*option.older, **hidden)


def planning_values(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options of planning that a command has, as `autopar.plan` takes their values."""
    return {
        name: TABLE[name].kind.read(getattr(args, name), TABLE[name].spelled)
        for name in names
        if hasattr(args, name)
    }


def json_option(parser: Parser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else"
    )


def budget_options(parser: Parser) -> None:
    """Add --tokens and --price, which `budget_of` reads."""
    parser.add_argument(
        "--tokens", metavar="1T", help="tokens of a training run: adds its days and device hours"
    )
    parser.add_argument(
        "--price", metavar="2.5", help="price of a device and hour: adds what the run costs"
    )


def budget_of(args: argparse.Namespace) -> Budget:
    """The run that --tokens and --price ask about."""
    from autopar.analysis.program.throughput import Budget

    return Budget(
        tokens=parse_count(args.tokens, "--tokens") if args.tokens else None,
        price=price_of(args.price, "--price") if args.price else None,
    )


def price_of(text: str, option: str) -> float:
    """A price of a device and hour."""
    try:
        price = float(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is no number") from None
    if not 0 < price < math.inf:
        raise UsageError(f"{option}: {text} must be above 0")
    return price


def plan_argument(parser: Parser) -> None:
    """Add the positional PLAN."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file")


def model_argument(parser: Parser) -> None:
    """Add the positional MODEL."""
    parser.add_argument("model", metavar="MODEL", help=MODELS)


def trace_option(parser: Parser, where: str = "") -> None:
    """Add --trace; `where`: the condition under which it works, which opens its help."""
    text = "write the predicted timeline of a step to FILE, for chrome://tracing or Perfetto"
    parser.add_argument("--trace", metavar="FILE", help=where + text)


def backend_option(parser: Parser, *, strict: bool = False) -> None:
    """Add --backend; `strict`: also Gloo that is held to NCCL's rules."""
    explained = "communication library (default: what fits this machine)"
    if strict:
        explained += "; strict: Gloo on forked ranks, which are told what would hang on NCCL"
    parser.add_argument(
        "--backend", choices=(*BACKENDS, "strict") if strict else BACKENDS, help=explained
    )


def measuring_options(parser: Parser) -> None:
    """Add the options of commands that measure ranks."""
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of forked ranks (default: one a core, at least 2); under torchrun, its ranks",
    )
    backend_option(parser)


def check_measured_ranks(args: argparse.Namespace) -> None:
    """Refuse a single rank: it has nobody to exchange messages with."""
    if args.nproc is not None and args.nproc < 2:
        raise UsageError(f"--nproc is {args.nproc}; collectives are measured on 2 ranks or more")


def measured_kinds(args: argparse.Namespace) -> list[str]:
    """The kinds in --collectives."""
    return [kind for kind in args.collectives.split(",") if kind]
