"""The project of a configuration file, by its name and contents, and its text as plain values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, unknown
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import parse_yaml, read_text

from .configuration import Configuration
from .deepspeed import read_deepspeed
from .huggingface import STYLES, WHOLE, read_tensor_plan
from .megatron import read_megatron, read_table
from .torchtitan import read_torchtitan

YAML = (".yaml", ".yml")
FORMATS = ("torchtitan", "megatron", "deepspeed", "hf-tp-plan")


def read_configuration(path: str | Path, form: str | None = None) -> Configuration:
    """The configuration in a file of the format `form` (None: as the file looks)."""
    path = Path(path)
    if form is not None and form not in FORMATS:
        raise UsageError(unknown("format", form, FORMATS))
    text = read_text(path, CONFIGURATION_BYTES, what="configuration", error=UsageError)
    form = form or _form(path, text)
    if form == "megatron":
        is_yaml = path.suffix.lower() in YAML
        return read_table(parse_yaml(path, text)) if is_yaml else read_megatron(text)
    data = _parsed(path, text, toml=form == "torchtitan")
    readers = {
        "torchtitan": read_torchtitan,
        "deepspeed": read_deepspeed,
        "hf-tp-plan": read_tensor_plan,
    }
    return readers[form](data)


def _form(path: Path, text: str) -> str:
    """The format of a text: TOML is torchtitan's, options and YAML are Megatron's.

    JSON is a plan of styles if it holds nothing but names of styles, or else DeepSpeed's.
    """
    if path.suffix.lower() in YAML:
        return "megatron"
    if path.suffix.lower() == ".toml":
        return "torchtitan"
    if text.lstrip()[:1] == "{":
        values = _parsed(path, text, toml=False).values()
        styles = {*STYLES, *WHOLE}
        if values and all(isinstance(value, str) and value in styles for value in values):
            return "hf-tp-plan"
        return "deepspeed"
    if "--" in text:
        return "megatron"
    raise UsageError(
        f"{path}: of which project it is does not show: give --from {'|'.join(FORMATS)}"
    )


def _parsed(path: Path, text: str, *, toml: bool) -> Mapping[str, Any]:
    try:
        data = tomllib.loads(text) if toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not {'TOML' if toml else 'JSON'}: {error}") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"{path}: holds no table")
    return data
