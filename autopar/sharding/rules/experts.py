"""Rules of mixtures of experts: products of rows that are sorted by expert with the weights of their experts."""

from __future__ import annotations

from .registry import register

GROUPED = "t k, e k n, !f -> t n | k: sum; e: masked; e: sum; e + t: dispatch"
"""Rows split: each rank works with all weights on its rows. Experts split: each rank works on the rows of its experts, the others'
are zero; or, with the rows split too, the rows travel to their experts and back."""

register("transformers.grouped_mm_fallback.default", GROUPED, linear=((0,), (1,)), products=("/e",))
