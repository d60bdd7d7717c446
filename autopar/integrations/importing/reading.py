"""The project of a configuration file, by its name and contents, and its text as plain values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, unknown
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import parse_yaml, read_text

from .accelerate import MARKS, read_accelerate
from .configuration import Configuration
from .deepspeed import read_deepspeed
from .huggingface import CLASS, STYLES, WHOLE, read_distributed_config, read_tensor_plan
from .megatron import read_megatron, read_table
from .megatron_bridge import read_recipe
from .torchtitan import read_torchtitan
from .torchtitan_registry import read_registry

YAML = (".yaml", ".yml")
FORMATS = ("torchtitan", "megatron", "megatron-bridge", "deepspeed", "accelerate", "transformers")
PYTHON = ".py"


def read_configuration(
    path: str | Path, form: str | None = None, given: Mapping[str, str] | None = None
) -> Configuration:
    """The configuration in a file of the format `form` (None: as the file looks).

    `given`: values of names that the file leaves to whoever uses it.
    """
    path = Path(path)
    if form is not None and form not in FORMATS:
        raise UsageError(unknown("format", form, FORMATS))
    text = read_text(path, CONFIGURATION_BYTES, what="configuration", error=UsageError)
    if form is None and path.suffix.lower() in YAML:
        form = _form_of_yaml(parse_yaml(path, text))
    form = form or _form(path, text, given)
    if path.suffix.lower() == PYTHON:
        in_python = {
            "torchtitan": read_registry,
            "megatron-bridge": read_recipe,
            "transformers": read_distributed_config,
        }
        if form not in in_python:
            raise UsageError(f"{path}: Python is read of {' and '.join(in_python)}, not of {form}")
        return in_python[form](path, text, given or {})
    if form == "megatron-bridge":
        raise UsageError(f"{path}: a recipe of megatron-bridge is a file of Python ({PYTHON})")
    readers: dict[str, Callable[[Mapping[str, Any]], Configuration]] = {
        "torchtitan": read_torchtitan,
        "deepspeed": read_deepspeed,
        "transformers": read_tensor_plan,
        "accelerate": read_accelerate,
        "megatron": read_table,
    }
    if path.suffix.lower() in YAML:
        return readers[form](parse_yaml(path, text))
    if form == "megatron":
        return read_megatron(text, given)
    return readers[form](_parsed(path, text, given, toml=form == "torchtitan"))


def _form_of_yaml(data: Mapping[str, Any]) -> str:
    return "accelerate" if any(name in data for name in MARKS) else "megatron"


def _form(path: Path, text: str, given: Mapping[str, str] | None) -> str:
    """The format of a text: TOML is torchtitan's, options are Megatron's, Python is by its words.

    JSON is a plan of styles if it holds nothing but names of styles, or else DeepSpeed's.
    """
    if path.suffix.lower() == ".toml":
        return "torchtitan"
    if path.suffix.lower() == PYTHON and "ConfigContainer" in text:
        return "megatron-bridge"
    if path.suffix.lower() == PYTHON and f"{CLASS}(" in text:
        return "transformers"
    if path.suffix.lower() == PYTHON and ".Config" in text:
        return "torchtitan"
    if text.lstrip()[:1] == "{":
        values = _parsed(path, text, given, toml=False).values()
        styles = {*STYLES, *WHOLE}
        if values and all(isinstance(value, str) and value in styles for value in values):
            return "transformers"
        return "deepspeed"
    if "--" in text:
        return "megatron"
    raise UsageError(
        f"{path}: of which project it is does not show: give --from {'|'.join(FORMATS)}"
    )


def _parsed(
    path: Path, text: str, given: Mapping[str, str] | None, *, toml: bool
) -> Mapping[str, Any]:
    if not toml:
        text = _filled(text, given or {})
    try:
        data = tomllib.loads(text) if toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        asked = "" if toml else _asked(text)
        raise UsageError(f"{path}: not {'TOML' if toml else 'JSON'}: {error}{asked}") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"{path}: holds no table")
    return data


def _filled(text: str, given: Mapping[str, str]) -> str:
    """A template of JSON with values for the bare words in it."""
    if not given:
        return text
    return _TEXT_OR_WORD.sub(lambda match: given.get(match[0], match[0]), text)


def _asked(text: str) -> str:
    """The sentence on bare words for which a text is no JSON."""
    words = [match[0] for match in _TEXT_OR_WORD.finditer(text) if match[0][0] != '"']
    names = dict.fromkeys(word for word in words if word not in ("true", "false", "null"))
    asked = " ".join(f"--set {name}=VALUE" for name in list(names)[:20])
    return f"; words are to be filled in: give {asked}" if names else ""


_TEXT_OR_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\b[A-Za-z_]\w*')
