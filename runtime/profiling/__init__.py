"""A profiled step.

A planned module comes in, seconds by action beside the plan's predictions go out.
"""

from .profile import Profile, profile

__all__ = ["Profile", "profile"]
