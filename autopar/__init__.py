"""autopar finds the cheapest way to split a neural network over many devices, and runs it.

Importing it is cheap: what is named below loads on first use.
"""

from __future__ import annotations

import sys as _sys
from collections.abc import Callable as _Callable
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any as _Any

__version__ = "0.2.0"

__all__ = [
    "Cluster",
    "Plan",
    "compare",
    "convert",
    "estimate_memory",
    "explain",
    "import_plan",
    "parallelize",
    "plan",
    "report",
    "train",
    "verify",
]

_OF_MODULE = {
    "autopar.analysis.measurements.recalibration": ("recalibrated",),
    "autopar.api": ("host_states", "local_optimizer", "parallelize", "parameters_on_meta", "plan"),
    "autopar.costmodel": ("Cluster",),
    "autopar.integrations.mindspore.context": (
        "get_auto_parallel_context",
        "reset_auto_parallel_context",
        "set_auto_parallel_context",
        "set_context",
    ),
    "autopar.integrations.mindspore.context.marks": (
        "add_prim_attr",
        "layerwise_parallel",
        "shard",
    ),
    "autopar.integrations.oneflow": (
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
    "autopar.interface.answers": ("compare", "explain", "report"),
    "autopar.interface.memory": ("estimate_memory",),
    "autopar.interface.projects": ("convert", "import_plan", "train", "verify"),
    "autopar.operators": ("discover", "register_rule"),
    "autopar.plan": ("Plan",),
    "autopar.report.summary": ("summary", "summary_html"),
    "autopar.report.what_if": ("what_if",),
    "autopar.runtime.compression": ("SmallAdamW",),
    "autopar.runtime.optimizers": ("Lamb", "Momentum", "Muon"),
    "autopar.runtime.profiling.profile": ("profile",),
    "autopar.runtime.training.export": ("export_checkpoint", "export_weights"),
    "autopar.runtime.training.importing": ("import_weights",),
    "autopar.runtime.training.resuming": ("resume",),
    "autopar.runtime.training.sampling": ("sampler",),
    "autopar.runtime.training.saving": ("save",),
    "autopar.runtime.training.stopping": ("steps",),
    "autopar.runtime.training.tokens": ("tokens",),
    "autopar.training.elastic": ("elastic",),
}
"""Public names by their module."""
_LAZY = {name: module for module, names in _OF_MODULE.items() for name in names}
_MODULES = {
    "communication": "autopar.communication",
    "errors": "autopar.errors",
    "sbp": "autopar.integrations.oneflow.sbp",
}
_NAMES = {"summary_html": "html"}
"""Public names with another name in their module."""


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_LAZY[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    """The documented names."""
    return sorted({*_LAZY, *_MODULES, "__version__", "__all__"})


class _Package(_ModuleType):
    """The package as a module whose attributes `plan` and `report` are always functions.

    An import of the modules of these names would otherwise replace them.
    """

    @property
    def plan(self) -> _Callable[..., _Any]:
        """The function that plans a model; `from autopar.plan import ...` reaches the module."""
        function: _Callable[..., _Any] = __getattr__("plan")
        return function

    @plan.setter
    def plan(self, module: _ModuleType) -> None:
        """The import system binds a loaded submodule here; the function stays."""

    @property
    def report(self) -> _Callable[..., _Any]:
        """The function that writes a page; `from autopar.report import ...` reaches the package."""
        function: _Callable[..., _Any] = __getattr__("report")
        return function

    @report.setter
    def report(self, module: _ModuleType) -> None:
        """The import system binds a loaded subpackage here; the function stays."""

    def __reduce__(self) -> tuple[_Callable[[str], _ModuleType], tuple[str]]:
        """Support pickling with a program's globals, as Ray does.

        The worker imports this package.
        """
        return _import_module, (__name__,)


_sys.modules[__name__].__class__ = _Package
