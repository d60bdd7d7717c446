"""What pins, a scheme or a loaded plan leave to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..ir import Tensor
from ..sharding.analysis import Offer
from ..sharding.candidates import Strategies
from ..sharding.layout import Layout

Allow = Callable[[str, Offer, Strategies], NDArray[np.bool_]]
"""Which strategies of the operator of that name may be chosen."""
AllowLayouts = Callable[[Tensor, tuple[Layout, ...]], NDArray[np.bool_]]
"""Which storage layouts of a parameter may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Which strategies, storage layouts and output layouts may be chosen; everything by default."""

    strategies: Allow | None = None
    storage: AllowLayouts | None = None
    outputs: Mapping[str, Layout] = field(default_factory=dict)
