"""A run compared with one device.

A plan and a model come in, a report of their differences goes out.
"""

from .check import compare, observe, observe_model
from .differences import Observation, Report, differences

__all__ = ["Observation", "Report", "compare", "differences", "observe", "observe_model"]
