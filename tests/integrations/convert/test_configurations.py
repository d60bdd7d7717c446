"""Outputs for plans of configurations: every name is a module of transformers' own class."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_models import styles_of
from torch import nn

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.integrations.convert import convert
from tests.end_to_end.small_types import small_configuration

transformers = pytest.importorskip("transformers")

TYPES = {
    "qwen3": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM",
    "gemma3": "AutoModelForImageTextToText",
    "t5": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForMaskedLM",
    "vit": "AutoModelForImageClassification",
}
"""Types, and the classes of transformers that make their modules."""
UNSAID = {
    "bert": "splitting the weights of modules",
    "t5": "columns of .*relative_attention_bias that stay split",
}
"""What styles of transformers cannot say: a head's bias of another module, heads of a table."""
SPLIT = dict.fromkeys(set(TYPES) - {"mixtral", *UNSAID}, ("megatron", ("transformers", "dtensor")))
"""Schemes and targets; experts are no linear layers, whose splits these targets cannot say."""


def _module(kind: str) -> nn.Module:
    """The module as a user of transformers makes it."""
    mapping = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    keys = small_configuration(kind)
    keys.pop("model_type")
    with torch.device("meta"):
        module: nn.Module = getattr(transformers, TYPES[kind]).from_config(mapping[kind](**keys))
    return module


def _texts(folder: Path, kind: str, scheme: str, targets: Iterable[str]) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(small_configuration(kind)))
    dims = {} if kind == "vit" else {"sequence": 16}
    loaded = load_any(f"hf:{folder}", ModelOptions(batch=4, dims=dims))
    plan = plan_loaded(loaded, devices=2, cluster="local-cpu", scheme=scheme).plan
    return {target: convert(plan, target).text for target in targets}


def _assigned(text: str, name: str) -> Any:
    """The value of a name in a Python file; of a dict its keys."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if isinstance(node.value, ast.Dict):
                return [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name} is not in the file")


def _require_modules(kind: str, patterns: Iterable[str], kinds: tuple[type, ...] | None) -> None:
    modules = dict(_module(kind).named_modules())
    patterns = list(patterns)
    assert patterns
    for pattern in patterns:
        matched = [part for name, part in modules.items() if fnmatchcase(name, pattern)]
        assert matched, f"{pattern} names no module of {kind}"
        assert kinds is None or all(isinstance(part, kinds) for part in matched), pattern


@pytest.mark.parametrize("kind", sorted(SPLIT))
def test_splits_name_modules(tmp_path: Path, kind: str) -> None:
    texts = _texts(tmp_path, kind, *SPLIT[kind])
    split = (nn.Linear, nn.Embedding)
    styles = styles_of(texts["transformers"])
    by_weight = [name for name, style in styles.items() if "wise" in style]
    _require_modules(kind, by_weight, split)
    _require_modules(kind, styles, None)
    assert set(_assigned(texts["dtensor"], "PLAN")) == set(styles)


@pytest.mark.parametrize("kind", sorted(UNSAID))
def test_styles_that_transformers_does_not_run_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match=UNSAID[kind]):
        _texts(tmp_path, kind, "megatron", ("dtensor", "transformers"))


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_units_are_layers(tmp_path: Path, kind: str) -> None:
    texts = _texts(tmp_path, kind, "zero3", ("fsdp2", "dtensor"))
    for text in texts.values():
        _require_modules(kind, _assigned(text, "UNITS"), None)
