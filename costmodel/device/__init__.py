"""Devices and the seconds of their kernels: products, attention, grouped products, elementwise traffic and launches."""

from .model import FAMILIES, Device, check, check_fractions

__all__ = ["FAMILIES", "Device", "check", "check_fractions"]
