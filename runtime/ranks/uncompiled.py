"""A guard against a caller's `torch.compile`: the order of a planned module stays plain Python.

The order issues collectives and frees memory between them, which no compiler may move.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

REASON = "a planned module runs an order of its own"


def runs_as_it_is(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, which `torch.compile` of a caller neither follows nor compiles in parts."""
    state: dict[str, Callable[Parameters, Result]] = {}

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # Nobody compiles where torch's compiler is not loaded; importing it takes seconds.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not state:
            state["plain"] = torch.compiler.disable(  # type: ignore[no-untyped-call]
                function, reason=f"{REASON}; its compile() compiles what lies between"
            )
        return state["plain"](*args, **kwargs)

    # The guard itself must not be followed either, since it looks at the compiler's state.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return run
