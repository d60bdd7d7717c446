"""The reason why a published row cannot be priced."""

from __future__ import annotations


class Missing(Exception):
    """A row does not define its run, or names something not described.

    The message is the reason.
    """
