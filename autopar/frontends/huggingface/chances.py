"""Work that a module leaves out by chance in training, which a plan has in every step.

Which layers a step skips (LayerDrop, arXiv:1909.11556) and which frames of a sound it hides
(SpecAugment, arXiv:1904.08779) is drawn on the host, where a program draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_FRAMES = ("mask_time_prob", "mask_feature_prob")
_MASKS = "apply_spec_augment"


def without_chances(config: Any) -> list[str]:
    """Set what a configuration leaves to chance to its certain value; sentences of what was set."""
    notes: dict[str, None] = {}
    for part in _parts(config):
        for name in _LAYERS:
            if chance := getattr(part, name, 0):
                setattr(part, name, 0.0)
                notes[f"every step computes all layers ({name} is {chance:g} in its file)"] = None
        if getattr(part, _MASKS, True) and any(getattr(part, name, 0) for name in _FRAMES):
            setattr(part, _MASKS, False)
            notes[f"no frames are hidden by chance ({_MASKS} is true in its file)"] = None
    return list(notes)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration, and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)
