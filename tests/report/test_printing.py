"""Text in 80 columns: nothing is wider where words allow it, no name is broken inside a word, and
pipes obey COLUMNS.
"""

from __future__ import annotations

import io
import re

import pytest

import autopar
from autopar.analysis.program.layer_names import folded
from autopar.cli.examples import EXAMPLES
from autopar.cli.parser import build_parser
from autopar.errors import UsageError
from autopar.options.checking import checked
from autopar.report.printing import Table, plain, sentence, show, wrap_cell

NAMES = (
    "transformer.layers.{0..31}.attention/query_projection",
    "transformer.layers.{0..31}.feed_forward/gate_projection",
)
TABLE = Table(
    title="Operators",
    columns=("operators", ">ops", "strategy", "collectives per step", ">bytes", ">time"),
    rows=tuple(
        (
            name,
            "24",
            "batch over gpu0; column-parallel over gpu1",
            "12 all-reduce",
            "9.00 MiB",
            "211 us",
        )
        for name in NAMES
    ),
)
SENTENCE = (
    "scheme data 2 x megatron 4: The batch is split over 2 devices; heads, feed-forward and "
    "vocabulary are split over 4 devices."
)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit(width: int) -> None:
    text = plain(TABLE, width)
    assert max(map(len, text.splitlines())) <= width
    words = {piece for line in text.splitlines() for piece in re.findall(r"[A-Za-z{}]+", line)}
    assert {
        "transformer",
        "attention",
        "query",
        "projection",
        "feed",
        "gate",
        "column-parallel".partition("-")[0],
    } <= words


def test_columns_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, widest in (("80", 80), ("", 1000), ("no", 1000)):
        monkeypatch.setenv("COLUMNS", columns)
        out = io.StringIO()
        show([SENTENCE, TABLE], out)
        assert max(map(len, out.getvalue().splitlines())) <= widest
        assert (max(map(len, out.getvalue().splitlines())) > 80) == (widest > 80)


def test_terminals_obey_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for colourless in (False, True):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if colourless:
            monkeypatch.setenv("NO_COLOR", "")
        out = Terminal()
        show([TABLE], out)
        assert ("\x1b" in out.getvalue()) != colourless


def test_words_stay_whole() -> None:
    assert wrap_cell("a" * 30, 10) == ["a" * 30]
    assert wrap_cell("", 10) == []
    assert "".join(wrap_cell(NAMES[0], 12)) == NAMES[0]
    assert (
        sentence("  in x", 80) == "  in x"
        and sentence(SENTENCE, 60).replace("\n  ", " ") == SENTENCE
    )


def test_rows_fold_where_they_are_all_there() -> None:
    layers = [(f"h.{i}/mlp_{j}/up", "n" if i else "m") for i in range(3) for j in range(2)]
    assert folded(layers) == [(2, ("h.0/mlp_{0,1}/up", "m")), (4, ("h.{1,2}/mlp_{0,1}/up", "n"))]
    assert (
        sum(count for count, _ in folded([*layers, ("h.9/mlp_1/up", "n"), ("h.9/mlp_1/up", "n")]))
        == 8
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": "8"}, "devices is '8', a text; it must be a whole number: write devices=8"),
        ({"batch": 2.5}, "batch is 2.5, a fraction; it must be a whole number"),
        ({"memory": "80GBB"}, "memory '80GBB' is no amount of memory"),
        ({"memory": [1]}, "memory is .1., a list"),
    ],
)
def test_arguments_are_refused_in_words(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autopar.plan("model.onnx", **given)


def test_arguments_as_people_write_them() -> None:
    assert checked({"devices": 8, "memory": "80GiB", "mesh": (2, 4)}) == {
        "devices": 8,
        "memory": 80 * 2**30,
        "mesh": (2, 4),
    }


def test_examples_are_commands() -> None:
    import shlex

    for lines in EXAMPLES.values():
        for line in lines:
            _, rest = build_parser().parse_known_args(shlex.split(line.partition(" > ")[0]))
            assert not rest, line
