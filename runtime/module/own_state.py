"""Loading into the parameters that a rank holds: stand-ins for those of other stages take none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.runtime.stand_ins import Elsewhere


class OwnState(nn.Module):
    """A module that loads into the parameters that this rank holds.

    Its state dict has the stand-ins, too, so that a file of it alone is refused.
    """

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._without_stand_ins():
            super()._load_from_state_dict(*args, **kwargs)

    @contextmanager
    def _without_stand_ins(self) -> Iterator[None]:
        """Have the own parameters alone."""
        every = self._parameters
        own = {name: v for name, v in every.items() if not isinstance(v, Elsewhere)}
        # Torch has no door for this: both ways it goes through these.
        self.__dict__["_parameters"] = own
        try:
            yield
        finally:
            # Loading may have put others in their places.
            every.update(own)
            self.__dict__["_parameters"] = every
