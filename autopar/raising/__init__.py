"""Raises a graph from an exporter's operators to the words of the field."""

from .raised import raised

__all__ = ["raised"]
