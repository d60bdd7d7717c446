"""The price of a published run by sums over the parts of its model, beside that of its plan.

It is what published runs were validated by before plans had the habits of frameworks, and goes as
soon as no group of runs is told worse by its plan.
"""

from .configuration import Configuration
from .priced_step import Priced, price

__all__ = ["Configuration", "Priced", "price"]
