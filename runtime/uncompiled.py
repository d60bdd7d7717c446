"""A guard against a caller's `torch.compile`: the order of a planned module is Python that runs uncompiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")


def runs_as_it_is(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, which `torch.compile` of a caller neither follows nor compiles in parts."""
    state: dict[str, Callable[Given, Found]] = {}

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        if "torch._dynamo" not in sys.modules:  # nobody compiles; importing it takes seconds
            return function(*args, **kwargs)
        if not state:
            reason = "a planned module runs an order of its own; its compile() compiles what lies between"
            state["plain"] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
        return state["plain"](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "a planned module runs an order of its own"  # type: ignore[attr-defined]
    return run
