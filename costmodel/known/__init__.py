"""Known configurations: a transformer's price from sizes, parallel degrees and framework alone."""

from .configuration import Configuration
from .frameworks import FRAMEWORKS, Framework, framework_named, runner_named
from .graph_builder import Kernels
from .habits import Habits
from .priced_step import Priced, price
from .shape import Latent, Shape

__all__ = [
    "FRAMEWORKS",
    "Configuration",
    "Framework",
    "Habits",
    "Kernels",
    "Latent",
    "Priced",
    "Shape",
    "framework_named",
    "price",
    "runner_named",
]
