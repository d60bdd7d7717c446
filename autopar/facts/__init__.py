"""Facts of a program: the plain values that it rests on, beside its module's parameters."""

from .plain import (
    GONE,
    LARGEST,
    are_equal,
    attribute,
    inside,
    is_literal,
    is_own,
    is_own_module,
    is_own_type,
    is_plain,
    item,
)
from .values import Fact, Facts, FactsOf

__all__ = [
    "GONE",
    "LARGEST",
    "Fact",
    "Facts",
    "FactsOf",
    "are_equal",
    "attribute",
    "inside",
    "is_literal",
    "is_own",
    "is_own_module",
    "is_own_type",
    "is_plain",
    "item",
]
