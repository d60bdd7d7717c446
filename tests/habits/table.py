"""The table of all habits."""

from __future__ import annotations

from . import gradients, modules, optimizers
from .workshop import HABITS

__all__ = ["HABITS", "gradients", "modules", "optimizers"]
