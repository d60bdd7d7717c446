"""The intermediate representation: a model as a graph of operators on tensors, free of any
framework.
"""

from .graph import (
    DTYPE_BYTES,
    Graph,
    NarrowCopy,
    Operator,
    Ref,
    Role,
    Tensor,
    Value,
    needed_operators,
)
from .loss import with_loss
from .texts import graph_of, text_of

__all__ = [
    "DTYPE_BYTES",
    "Graph",
    "NarrowCopy",
    "Operator",
    "Ref",
    "Role",
    "Tensor",
    "Value",
    "graph_of",
    "needed_operators",
    "text_of",
    "with_loss",
]
