"""Known transformers: their sizes, and their graphs in the words of frameworks."""

from .shape import Latent, Shape

__all__ = ["Latent", "Shape"]
