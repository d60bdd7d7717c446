"""Collective communication by hand; `autopar.integrations.communication` holds the functions."""

from .integrations.communication import *  # noqa: F403  (its `__all__` is what there is)
from .integrations.communication import __all__ as __all__
