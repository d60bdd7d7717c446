"""The model and the request as the search sees them.

In: a graph, and what the user asks for. Out: `Request` with its restrictions, and `FoldedModel`,
the graph with its runs of equal layers folded.
"""

from .folded_model import FoldedModel
from .request import Request

__all__ = ["FoldedModel", "Request"]
