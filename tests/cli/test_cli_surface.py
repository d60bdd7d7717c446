"""The command line accepts exactly the options that docs/reference.md lists; `python
tests/cli/test_cli_surface.py` writes its tables anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.cli import COMMANDS, run
from autopar.cli.parser import build_parser
from autopar.costmodel.step.mesh_prices import OPTIMIZERS
from autopar.ir.dtype import cast_graph
from autopar.options import values as options
from autopar.planning.model.recompute import ALTERNATE, MODULES, RECOMPUTES
from autopar.planning.model.request import OFFLOADS, ZEROS
from autopar.schemes import SCHEMES
from autopar.search import SEARCHES

README = Path(__file__).resolve().parents[2] / "README.md"
REFERENCE = README.parent / "docs" / "reference.md"
MARK = "<!-- options: {} -->\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands without commands of their own, in the order of the help text."""
    children = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not children:
        yield parser
    for action in children:
        for child in action.choices.values():
            yield from _commands(child)


def _option(action: argparse.Action) -> str:
    value = action.metavar or (
        f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    )
    spelled = ", ".join(action.option_strings)
    text = f"{spelled} {value}".strip() if spelled and action.nargs != 0 else spelled or str(value)
    return f"`{text}`".replace("|", "\\|")


def option_tables() -> str:
    """All options of all commands as Markdown."""
    lines = []
    for parser in _commands(build_parser()):
        lines += [
            f"**`{parser.prog}`** {parser.description}",
            "",
            "| option | meaning |",
            "|---|---|",
        ]
        actions = [
            action
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
        ]
        lines += [
            f"| {_option(action)} | {(action.help or '').replace('|', chr(92) + '|')} |"
            for action in actions
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def _reference() -> tuple[str, str, str]:
    """The reference before, in and after the table of options."""
    before, start, rest = REFERENCE.read_text(encoding="utf-8").partition(MARK.format("start"))
    table, end, after = rest.partition(MARK.format("end"))
    assert start and end
    return before + start, table, end + after


def test_the_reference_lists_every_option() -> None:
    assert _reference()[1] == option_tables()


def test_names_are_those_of_the_tables() -> None:
    """The parser repeats them, so that help needs no heavy import."""
    assert set(options.OPTIMIZERS) == set(OPTIMIZERS)
    assert set(options.SEARCHES) == set(SEARCHES)
    assert tuple(SCHEMES) == options.SCHEMES
    assert options.RECOMPUTES == RECOMPUTES
    assert (options.ALTERNATE, options.RECOMPUTED_MODULES) == (ALTERNATE, MODULES)
    assert options.OFFLOADS == OFFLOADS
    assert options.ZEROS == ZEROS


@pytest.mark.parametrize("dtype", options.DTYPES)
def test_dtypes_are_those_that_graphs_can_be_cast_to(dtype: str) -> None:
    from autopar.ir import Graph

    assert (
        cast_graph(Graph(name="empty", tensors={}, operators=(), inputs=(), outputs=()), dtype).name
        == "empty"
    )


def test_every_command_has_help_that_names_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    names = set()
    for parser in _commands(build_parser()):
        words = parser.prog.split()[1:]
        names.add(words[0])
        with pytest.raises(SystemExit) as raised:
            run([*words, "--help"])
        assert raised.value.code == 0
        shown = capsys.readouterr().out
        told = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        assert all(name in shown for action in told for name in action.option_strings)
        assert all(action.help for action in parser._actions)
    assert names == set(COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar import __version__

    with pytest.raises(SystemExit) as raised:
        run(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"autopar {__version__}\n"


def test_documents_name_files_that_exist() -> None:
    root = README.parent
    for document in (README, REFERENCE, root / "docs" / "architecture.md"):
        for path in re.findall(
            r"`((?:autopar|costmodel|search|runtime|tests|examples|benchmarks|docs)/[\w/.-]*)`",
            document.read_text(encoding="utf-8"),
        ):
            assert (root / path).exists(), f"{document.name} names {path}"


def test_the_tour_names_functions_that_exist() -> None:
    """`name` (`file.py`) in the tour: the file defines the name."""
    text = (README.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    pairs = re.findall(r"`(\w+)(?:\(\))?` \(`([\w/]+\.py)`\)", text)
    assert len(pairs) > 10
    for name, path in pairs:
        assert re.search(
            rf"^\s*(def|class) {name}\b|^{name}\b",
            (README.parent / path).read_text(encoding="utf-8"),
            re.MULTILINE,
        ), f"{path}: {name}"


if __name__ == "__main__":
    before, _, after = _reference()
    REFERENCE.write_text(before + option_tables() + after, encoding="utf-8")
