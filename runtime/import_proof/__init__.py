"""The proof of an import: the graph that was read runs beside the model that was written.

A loaded model comes in, a `Proof` goes out; a difference is a `ModelError` that names the first
operator with another value.
"""

from .prove import Proof, prove_import

__all__ = ["Proof", "prove_import"]
