"""`autopar.toml`: defaults of a command's options, which the command line overrules, and names that
are wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.defaults import FILE, with_defaults
from autopar.cli.parser import build_parser, options_of
from autopar.errors import UsageError

OPTIONS = options_of(build_parser())


def given(text: str, argv: list[str], folder: Path) -> list[str]:
    (folder / FILE).write_text(text)
    return with_defaults(argv, OPTIONS, folder)


def test_defaults_come_first(tmp_path: Path) -> None:
    text = (
        '[plan]\ndevices = 8\ncluster = "dgx-h100"\npin = ["a=gpu:n", "b=gpu:k"]\nquiet = '
        "true\njson = false\n"
    )
    text += '[explain]\nmodel = "m.onnx"'
    arguments = given(text, ["plan", "m.onnx", "--devices", "4"], tmp_path)
    args = build_parser().parse_args(arguments)
    assert (args.model, args.devices, args.cluster, args.pins, args.quiet, args.json) == (
        "m.onnx",
        4,
        "dgx-h100",
        ["a=gpu:n", "b=gpu:k"],
        True,
        False,
    )
    assert given(text, ["explain", "p.json"], tmp_path) == ["explain", "--model=m.onnx", "p.json"]
    assert given(text, ["--version"], tmp_path) == ["--version"] and given(text, [], tmp_path) == []
    assert given("[plan]\nmicro_batches = 2", ["plan", "m"], tmp_path) == [
        "plan",
        "--micro-batches=2",
        "m",
    ]


def test_without_a_file_nothing_is_added(tmp_path: Path) -> None:
    assert with_defaults(["plan", "m"], OPTIONS, tmp_path) == ["plan", "m"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[plan]\ndevice = 8", "unknown option 'device': .*Perhaps you meant 'devices'"),
        ("[plann]\ndevices = 8", "unknown command 'plann': .*Perhaps you meant 'plan'"),
        ("plan = 3", "is no table"),
        ("[plan", "not TOML"),
        ("[plan]\ndevices = {a = 1}", "neither a text nor a number"),
        ("a = " + "[" * 5000, "not TOML"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"(?s)autopar\.toml.*{why}"):
        given(text, ["plan", "m"], tmp_path)
