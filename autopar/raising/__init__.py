"""Raises a graph from an exporter's operators to the words of the field."""

from .attention import attention
from .raised import ROWS, raised

__all__ = ["ROWS", "attention", "raised"]
