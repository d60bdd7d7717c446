"""The table of all habits."""

from __future__ import annotations

from tests.habits import gradients, modules, optimizers
from tests.habits.workshop import HABITS

__all__ = ["HABITS", "gradients", "modules", "optimizers"]
