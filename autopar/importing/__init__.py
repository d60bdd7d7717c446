"""Configurations of other projects as pins of the search: read, planned within, and set beside what the search finds without them."""

from __future__ import annotations

from .configuration import Configuration
from .planned import Imported, import_configuration
from .reading import FORMATS, read_configuration

__all__ = ["FORMATS", "Configuration", "Imported", "import_configuration", "read_configuration"]
