"""Operators of torch's dispatcher in the namespace `autopar`: what layers write at length.

Scans that are loops there, attention with sinks and windows, the scores of sparse attention,
rotary positions, and cross entropy with its product.
"""

from . import attention as attention
from . import index_scores as index_scores
from . import linear_cross_entropy as linear_cross_entropy
from . import rotation as rotation
from . import scans as scans
