"""Parameters as this rank holds them.

Whole values come in; shards, gathered units and reduced gradients go out.
"""

from .gradients import Gradients
from .host_states import host_states
from .storage import Storage, local_of
from .units import ParameterUnits, Stored

__all__ = ["Gradients", "ParameterUnits", "Storage", "Stored", "host_states", "local_of"]
