"""The intermediate representation: a model as a graph of operators on tensors, free of any
framework.
"""

from .graph import DTYPE_BYTES, Graph, Operator, Ref, Role, Tensor, Value, needed_operators
from .loss import with_loss

__all__ = [
    "DTYPE_BYTES",
    "Graph",
    "Operator",
    "Ref",
    "Role",
    "Tensor",
    "Value",
    "needed_operators",
    "with_loss",
]
