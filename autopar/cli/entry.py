"""The command line `autopar`: parses words, runs the command, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import io
import os
import sys
import traceback
from collections.abc import Sequence

from autopar.errors import AutoparError, UsageError
from autopar.printable import printable
from autopar.remembered import remembering_nothing

from .command import Action
from .commands import COMMANDS as ALL
from .defaults import with_defaults
from .interrupts import INTERRUPTED
from .output import print_json_error, stdout_to_stderr
from .parser import build_parser, options_of, spellings

BROKEN_PIPE = 128 + 13
"""The exit code of a program that a closed pipe ended."""
VERBOSE = "--verbose"
"""An option of every command: errors come with their traceback."""
NO_CACHE = "--no-cache"
"""An option of every command: nothing is recalled from earlier ones, and nothing remembered."""
COMMANDS: dict[str, Action] = {command.name: command.run for command in ALL}
"""The action of every command by its first word."""


def main() -> None:
    """Run the command of `sys.argv`, and exit with its code.

    An error that a user can cause is one line on stderr.
    """
    # A plan is made of very many small objects that live to the end: collecting cycles among them
    # only costs time.
    gc.set_threshold(200_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without Unicode is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    argv = [word for word in sys.argv[1:] if word != VERBOSE]
    verbose = VERBOSE in sys.argv[1:]
    try:
        status = run(argv)
        sys.stdout.flush()
        _leave_group()
    except AutoparError as error:
        if verbose:
            traceback.print_exception(error)
        print(f"autopar: error: {printable(str(error))}", file=sys.stderr)
        if "--json" in argv:
            print_json_error(error)
        status = error.exit_code
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        status = INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more: the interpreter's own flush at the end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    # The objects go with the process, so nobody has to look through them for cycles. Triton, which
    # torch brings along, complains of each of its own that is left.
    if "triton" not in sys.modules:
        gc.freeze()
    sys.exit(status)


def _leave_group() -> None:
    """End the process group of a command that was a rank: NCCL warns of one that is left."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def run(argv: Sequence[str]) -> int:
    """Run one command; raises the errors of `autopar.errors`.

    With --help or --version it raises `SystemExit(0)`.
    """
    parser = build_parser()
    words = [word for word in argv if word != NO_CACHE]
    args, rest = parser.parse_known_args(with_defaults(words, options_of(parser)))
    if rest:
        raise UsageError(_unexpected(args.parser, rest[0]))
    with contextlib.ExitStack() as stack:
        if NO_CACHE in argv:
            stack.enter_context(remembering_nothing())
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if getattr(args, "rules", None):
            _import_rules(args.rules)
        return COMMANDS[args.command](args) or 0
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "this needs PyTorch, which is not installed: pip install 'autopar[torch]'"
        ) from error


def _unexpected(parser: argparse.ArgumentParser, word: str) -> str:
    """The error about a word that no option or argument of a command takes."""
    stray = word.partition("=")[0]
    if not stray.startswith("-"):
        return f"unexpected argument {stray!r} (see {parser.prog} --help)"
    names = [name for name in spellings(parser) if name.startswith("--")]
    near = difflib.get_close_matches(stray, names, n=1)
    hint = f"perhaps you meant {near[0]}?" if near else "there is none of a similar name"
    return f"unknown option {stray}: {hint} ({parser.prog} --help lists them)"


def _import_rules(modules: Sequence[str]) -> None:
    from autopar.operators import import_rules

    with stdout_to_stderr():
        import_rules(modules)
