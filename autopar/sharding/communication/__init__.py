"""Communication inside operators: its table, its collectives, and rows on their way."""

from .largest_elements import axes_of_operands, has_largest
from .moves import Move
from .routing import domains_of_a_token
from .scales import Scales, scales_of
from .table import COMMUNICATIONS, operator_traffic, visited
from .travelling_rows import LOOK_UPS, places_on_the_way

__all__ = [
    "COMMUNICATIONS",
    "LOOK_UPS",
    "Move",
    "Scales",
    "axes_of_operands",
    "domains_of_a_token",
    "has_largest",
    "operator_traffic",
    "places_on_the_way",
    "scales_of",
    "visited",
]
