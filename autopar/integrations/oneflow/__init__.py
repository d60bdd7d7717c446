"""Global tensors: tensors with the whole's shape, of which each rank holds a part.

Their operators choose their own splits.

OneFlow's `placement` and `sbp` over the layouts, sharding rules and redistributions of plans. All
ranks run one program and call the same functions, whether a tensor lies on them or not.
"""

from .creation import from_dtensor, global_tensor, matmul, ones, randn, to_global, to_local, zeros
from .functions import operate
from .placement import TensorPlacement, placement
from .tensor import GlobalTensor

__all__ = [
    "GlobalTensor",
    "TensorPlacement",
    "from_dtensor",
    "global_tensor",
    "matmul",
    "ones",
    "operate",
    "placement",
    "randn",
    "to_global",
    "to_local",
    "zeros",
]
