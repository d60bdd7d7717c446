"""Known configurations: the price of a transformer from its sizes, its parallel degrees and a framework alone."""

from .configuration import Configuration, Habits
from .frameworks import FRAMEWORKS, Framework, framework_named
from .graph_builder import Kernels
from .shape import Latent, Shape
from .step import Priced, price
from .uneven import Stage, price_stages

__all__ = [
    "FRAMEWORKS", "Configuration", "Framework", "Habits", "Kernels", "Latent", "Priced", "Shape", "Stage", "framework_named", "price",
    "price_stages",
]  # fmt: skip
