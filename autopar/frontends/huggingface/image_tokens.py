"""Tokens of a text with images: a place for every row of features that the images become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autopar.errors import ModelError, UsageError
from autopar.ir import Graph, Ref

from .images import PIXELS, TOKENS
from .made import Configured

PLACES = "position_ids"
"""The argument with the places of tokens, along the text and in images."""
AXES = 3
"""Places that a token has where images have places of their own: in time, height and width."""
_INTO_PLACES = "aten.masked_scatter.default"
"""The operator that puts the features of images in the places of tokens."""


def placed(
    model: Configured, given: Mapping[str, Any], told: Mapping[str, Any], graph: Graph
) -> dict[str, Any]:
    """The tokens, with values: those of images come first in each sample, all others are equal.

    Also their places, where the model's code works them out of the tokens and the sizes of images.
    Empty where the inputs are no texts with images. `graph`: the model of these inputs.
    """
    import torch

    if not {TOKENS, PIXELS} <= set(given):
        return {}
    samples, sequence = given[TOKENS].shape
    rows = _rows(graph) // samples
    if rows > sequence:
        raise UsageError(f"--seq is {sequence}, and the image of a sample alone has {rows} tokens")
    names = ("image_token_id", "image_token_index")
    mark = next((mark for name in names if (mark := getattr(model.config, name, None))), None)
    if mark is None:
        raise ModelError(f"{type(model.module).__name__}: its configuration has no {names[0]}")
    tokens = torch.zeros((samples, sequence), dtype=torch.long)
    tokens[:, :rows] = mark
    if PLACES not in given:
        return {TOKENS: tokens}
    kinds = (tokens == mark).int()
    places, _ = model.module.base_model.get_rope_index(
        input_ids=tokens, mm_token_type_ids=kinds, **told
    )
    return {TOKENS: tokens, PLACES: places}


def has_places(model: Configured) -> bool:
    """Whether a model's code works out the places of tokens, which are an input then."""
    return hasattr(getattr(model.module, "base_model", None), "get_rope_index")


def _rows(graph: Graph) -> int:
    """The rows of features that all images become; 0 where they are not put among the tokens."""
    for operator in graph.operators:
        source = operator.attributes.get("source")
        if operator.kind == _INTO_PLACES and isinstance(source, Ref):
            shape = graph.tensors[operator.inputs[source.index]].shape
            return math.prod(shape[:-1])
    return 0
