"""The file of `autopar train`: what is read, and how whatever is wrong in it is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.training.config import Config, load_config
from autopar.training.loop import named_callable

GOOD = """
[model]
config = "config.json"
[data]
tokens = "text.txt"
type = "uint8"
sequence = 8
batch = 4
[optimizer]
lr = 1
betas = [0.9, 0.95]
[training]
folder = "run"
steps = 10
[plan]
scheme = "zero3"
"""


def _load(tmp_path: Path, text: str) -> Config:
    (tmp_path / "train.toml").write_text(text, encoding="utf-8")
    return load_config(tmp_path / "train.toml")


def test_paths_are_those_beside_the_file(tmp_path: Path) -> None:
    model = _load(tmp_path, GOOD)
    assert (model.model.config, model.data.tokens) == (
        str(tmp_path / "config.json"),
        str(tmp_path / "text.txt"),
    )
    assert (model.training.folder, model.optimizer.lr, model.plan) == (
        str(tmp_path / "run"),
        1.0,
        {"scheme": "zero3"},
    )


REFUSED: dict[str, tuple[str, str, str]] = {
    "a key": (
        "steps = 10",
        "stepps = 10",
        r"training: unknown key 'stepps': valid are folder, steps.*Perhaps you meant 'steps'",
    ),
    "a table": (
        "[plan]",
        "[plans]",
        r"the file: unknown key 'plans': valid are model, data, optimizer, .*Perhaps you meant "
        r"'plan'",
    ),
    "an option of planning": (
        "scheme =",
        "schema =",
        r"plan: unknown key 'schema': valid are cluster.*Perhaps you meant 'scheme'",
    ),
    "the planned optimizer": ("scheme =", "optimizer =", "unknown key 'optimizer'"),
    "nothing": (GOOD, "", "model: is missing"),
    "a missing key": ("steps = 10", "", "training.steps: is missing"),
    "a text for a number": (
        "steps = 10",
        'steps = "10"',
        "training.steps: Input should be a valid integer",
    ),
    "a number too small": (
        "steps = 10",
        "steps = 0",
        "training.steps: Input should be greater than or equal to 1",
    ),
    "a learning rate": ("lr = 1", "lr = -1", "optimizer.lr: Input should be greater than 0"),
    "three betas": ("betas = [0.9, 0.95]", "betas = [0.9, 0.95, 1]", "optimizer.betas"),
    "an optimizer": (
        "lr = 1",
        'lr = 1\nname = "adam"',
        "optimizer.name: Input should be 'adamw', 'sgd', 'momentum', 'lamb' or 'muon'",
    ),
    "two models": (
        'config = "config.json"',
        'config = "config.json"\ncallable = "a:b"',
        "model: give either config or callable",
    ),
    "no model": ('config = "config.json"', "", "model: give either config or callable"),
    "two data": ('type = "uint8"', 'callable = "a:b"', "data: give either tokens or callable"),
    "no sequence": ("sequence = 8", "", "data: tokens need a sequence"),
    "no callable": (
        'config = "config.json"',
        'callable = "os.system"',
        "'os.system' is not of the form package.module:function",
    ),
    "code": (
        'config = "config.json"',
        'callable = "os:system(1)"',
        "is not of the form package.module:function",
    ),
    "no TOML": (GOOD, "[model", "no TOML"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    old, new, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        _load(tmp_path, GOOD.replace(old, new))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("os:none", "has no function 'none'"),
        ("os:sep", "has no function"),
    ],
)
def test_a_callable_that_is_none(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        named_callable(name, "model.callable")


def test_every_table_has_its_say() -> None:
    """The tables of the documents are those of the file."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(
        encoding="utf-8"
    )
    tables: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
    for table, kind in tables.items():
        for key in getattr(kind, "model_fields", {}):
            assert f"`{table}.{key}`" in page, f"{table}.{key}"
