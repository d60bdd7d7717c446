"""Masks whose values are known: left out of attentions, or made once for all sequences."""

from .attentions import without_known_masks
from .batches import with_masks_of_one_sequence

__all__ = ["with_masks_of_one_sequence", "without_known_masks"]
