"""Helpers that write the text of a rule out of the dims of single tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .registry import Call


def whole(shape: Sequence[int], name: str) -> str:
    """Dims that are never split, each a factor of its own that starts with `name`.

    >>> whole((2, 3), "w")
    '!w0 !w1'
    """
    return " ".join(f"!{name}{i}" for i in range(len(shape)))


def by_name(call: Call, inputs: Mapping[str, str], outputs: Sequence[str]) -> str:
    """A rule from the dims of the tensor arguments by their formal names; the others are whole."""
    # An input that a rule does not name stays whole, so that an optional one cannot be forgotten.
    spelled = [whole(tensor.shape, f"w{position}_") for position, tensor in enumerate(call.inputs)]
    for name, dims in inputs.items():
        position = call.position(name)
        if position is not None:
            spelled[position] = dims
    return ", ".join(spelled) + " -> " + ", ".join(outputs[: len(call.outputs)])


def tensor_named(call: Call, name: str) -> tuple[int, ...] | None:
    """The shape of the tensor argument `name`, or None where it is absent."""
    position = call.position(name)
    return None if position is None else call.inputs[position].shape


def ones(shape: Sequence[int]) -> str:
    """The dims of a tensor of one element.

    >>> ones((1, 1))
    '1 1'
    """
    return " ".join("1" for _ in shape)
