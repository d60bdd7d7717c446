"""Operators of torch's dispatcher in the namespace `autopar`: what layers write at length.

Scans that are loops there, and the scores of sparse attention.
"""

from . import index_scores as index_scores
from . import scans as scans
