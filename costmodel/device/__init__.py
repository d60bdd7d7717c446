"""Devices and the seconds of their kernels: products, attention, traffic and launches."""

from .device import FAMILIES, Device, check, check_fractions

__all__ = ["FAMILIES", "Device", "check", "check_fractions"]
