"""Known configurations: the price of a transformer from its shape and its parallel degrees alone."""

from .configuration import Configuration, Habits
from .shape import Shape
from .step import Priced, price

__all__ = ["Configuration", "Habits", "Priced", "Shape", "price"]
