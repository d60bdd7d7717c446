"""Why a published row cannot be priced."""

from __future__ import annotations


class Missing(Exception):
    """A row leaves open what was run, or names what is not described; the message is the reason."""
