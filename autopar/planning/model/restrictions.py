"""The choices that pins, a scheme or a loaded plan allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Tensor
from autopar.sharding.analysis import Offer
from autopar.sharding.layout import Layout
from autopar.sharding.strategies import Strategies

Allow = Callable[[str, Offer, Strategies], NDArray[np.bool_]]
"""The mask of an operator's allowed strategies, given its name."""
AllowLayouts = Callable[[Tensor, tuple[Layout, ...]], NDArray[np.bool_]]
"""The mask of a parameter's allowed storage layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed strategies, storage layouts and output layouts; all by default."""

    strategies: Allow | None = None
    storage: AllowLayouts | None = None
    outputs: Mapping[str, Layout] = field(default_factory=dict)
