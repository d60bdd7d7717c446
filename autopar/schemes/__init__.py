"""Schemes known by name: what each leaves to choose (a restriction of the search), and which of them a plan found is."""

from .axis import AXIS_SCHEMES, AxisScheme
from .known import SCHEMES, Scheme, scheme_named
from .naming import Factor, Named, scheme_of

__all__ = ["AXIS_SCHEMES", "SCHEMES", "AxisScheme", "Factor", "Named", "Scheme", "scheme_named", "scheme_of"]
