"""Precisions of training: bytes for each element of a parameter, its gradient and its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES, Tensor
from autopar.sharding.schedule import Types


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes for each element of a parameter; None: as many as the parameter has itself.

    `gradient`; `master`: a copy in higher precision (0: none); `state`: of each of the optimizer's
    tensors. `main`: gradients are added into permanent buffers of that size. `types` of a plan:
    only the master is stored, gradients arrive in its type, and used values are cast unit by unit.
    """

    gradient: float | None = None
    master: float = 0.0
    state: float | None = None
    main: bool = False
    types: Types | None = None

    def casts(self, tensor: Tensor) -> bool:
        """Whether only the master of a parameter is stored."""
        return self.types is not None and self.types.casts(tensor)

    def of(self, tensor: Tensor) -> tuple[float, float, float]:
        """Bytes of (gradient, master, one state) for each element of a trained parameter."""
        if self.types is None:
            return self.sizes(tensor.dtype)
        if not self.types.casts(tensor):
            return SAME.sizes(tensor.dtype)
        stored = float(DTYPE_BYTES[self.types.stored(tensor)])
        return stored, stored, stored if self.state is None else self.state

    def sizes(self, dtype: str) -> tuple[float, float, float]:
        """The bytes of gradient, master and state for a parameter stored in `dtype`."""
        own = float(DTYPE_BYTES[dtype])
        return (
            own if self.gradient is None else self.gradient,
            self.master,
            own if self.state is None else self.state,
        )


SAME = Precision()
PRECISIONS: Mapping[str, Precision] = {
    "same": SAME,
    "mixed": Precision(master=4.0, state=4.0),
    "mixed-main": Precision(gradient=4.0, master=4.0, state=4.0, main=True),
}
"""`same`: everything in the parameter's type. `mixed`: 16-bit weights and gradients, 2 + 2 + 12
bytes with Adam (Rajbhandari et al., arXiv:1910.02054, section 3.1). `mixed-main`: gradients summed
in float32, 18 bytes with Adam (Megatron-LM's page on its distributed optimizer).
"""
