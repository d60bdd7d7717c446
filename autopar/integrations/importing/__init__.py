"""Configurations of other projects as pins of the search.

They are read, planned, and compared with the search's own plan.
"""

from __future__ import annotations

from .configuration import Configuration
from .configuration_plan import Hardware, Imported, import_configuration
from .reading import FORMATS, read_configuration

__all__ = [
    "FORMATS",
    "Configuration",
    "Hardware",
    "Imported",
    "import_configuration",
    "read_configuration",
]
