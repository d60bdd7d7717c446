"""Operators of torch's dispatcher in the namespace `autopar`: what layers write at length.

Scans that are loops there, the scores of sparse attention, and rotary positions.
"""

from . import index_scores as index_scores
from . import rotation as rotation
from . import scans as scans
