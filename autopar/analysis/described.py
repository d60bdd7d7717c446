"""The description of a configuration's module, remembered: its project takes seconds to import."""

from __future__ import annotations

import dataclasses
import json

from pydantic import TypeAdapter, ValidationError

from autopar.frontends.huggingface import DTYPE, content_of
from autopar.frontends.huggingface.types import Described, described
from autopar.remembered import key_of, recalled, remember

_PACKAGES = ("autopar", "torch", "transformers", "diffusers")


def described_model(path: str) -> Described:
    """Describe a configuration's module; raises the errors of `configured`."""
    key = key_of("description", (DTYPE, content_of(path)), _PACKAGES)
    text = recalled(key)
    if text is not None:
        try:
            return TypeAdapter(Described).validate_json(text)
        except ValidationError:
            # A file that others have written there is not what is remembered.
            pass
    made = described(path, DTYPE)
    remember(key, json.dumps(dataclasses.asdict(made)))
    return made
