"""Loading into the parameters that a rank holds: stand-ins for those of other stages take none."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar.runtime.stand_ins import Elsewhere


class OwnState(nn.Module):
    """A module that loads into the parameters that this rank holds.

    Its state dict has the stand-ins, too, so that a file of it alone is refused.
    """

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        every = self._parameters
        own = {name: v for name, v in every.items() if not isinstance(v, Elsewhere)}
        # Torch gives each module a dict of its own, and would call the rest unexpected.
        for name in every.keys() - own.keys():
            state_dict.pop(prefix + name, None)
        self.__dict__["_parameters"] = own
        try:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        finally:
            # Loading may have put others in their places.
            every.update(own)
            self.__dict__["_parameters"] = every
