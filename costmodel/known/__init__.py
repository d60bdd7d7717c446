"""Known configurations: a transformer's price from sizes, parallel degrees and framework alone."""

from .configuration import Configuration
from .priced_step import Priced, price
from .shape import Latent, Shape

__all__ = ["Configuration", "Latent", "Priced", "Shape", "price"]
