"""autopar finds the cheapest way to split a neural network over many devices, and runs it.

Importing it is cheap: what is named below loads on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

_LAZY = {
    "Plan": "autopar.plan",
    "parallelize": "autopar.api",
    "register_rule": "autopar.operators",
    "discover": "autopar.operators",
    "set_auto_parallel_context": "autopar.integrations.mindspore.context",
    "get_auto_parallel_context": "autopar.integrations.mindspore.context",
    "reset_auto_parallel_context": "autopar.integrations.mindspore.context",
    "host_states": "autopar.api",
    "shard": "autopar.integrations.mindspore.context.marks",
    "add_prim_attr": "autopar.integrations.mindspore.context.marks",
    "layerwise_parallel": "autopar.integrations.mindspore.context.marks",
    "what_if": "autopar.report.what_if",
    "summary": "autopar.report.summary",
    "parameters_on_meta": "autopar.api",
    "local_optimizer": "autopar.api",
}


_MODULES = {"communication": "autopar.communication", "sbp": "autopar.integrations.oneflow.sbp"}
_LAZY |= {
    "Lamb": "autopar.runtime.optimizers",
    "Momentum": "autopar.runtime.optimizers",
    "Muon": "autopar.runtime.optimizers",
    "SmallAdamW": "autopar.runtime.compression",
}
_LAZY |= {"save": "autopar.runtime.training.saving", "resume": "autopar.runtime.training.resuming"}
_LAZY |= {
    "sampler": "autopar.runtime.training.sampling",
    "steps": "autopar.runtime.training.stopping",
}
_LAZY |= dict.fromkeys(("export_checkpoint", "export_weights"), "autopar.runtime.training.export")
_LAZY |= {
    "import_weights": "autopar.runtime.training.importing",
    "tokens": "autopar.runtime.training.tokens",
}
_LAZY |= {"elastic": "autopar.training.elastic", "profile": "autopar.runtime.profiling.profile"}
_LAZY |= dict.fromkeys(
    (
        "GlobalTensor",
        "from_dtensor",
        "global_tensor",
        "matmul",
        "ones",
        "placement",
        "randn",
        "to_global",
        "to_local",
        "zeros",
    ),
    "autopar.integrations.oneflow",
)
_LAZY["recalibrated"] = "autopar.analysis.measurements.recalibration"
_LAZY["summary_html"] = "autopar.report.summary"
_NAMES = {"summary_html": "html"}
"""Public names with another name in their module."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES, "plan"})


class _Package(ModuleType):
    """The package as a module whose attribute `plan` is always the function of `autopar/api.py`.

    An import of the module `autopar/plan.py` would otherwise replace it.
    """

    @property
    def plan(self) -> Callable[..., Any]:
        """The function that plans a model; `from autopar.plan import ...` reaches the module."""
        function: Callable[..., Any] = import_module("autopar.api").plan
        return function

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        """The import system binds a loaded submodule here; the function stays."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Support pickling with a program's globals, as Ray does.

        The worker imports this package.
        """
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
