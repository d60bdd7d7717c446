"""What a device is and what its kernels take: products, attention, grouped products, elementwise traffic and launches."""

from .model import FAMILIES, Device, check, check_fractions

__all__ = ["FAMILIES", "Device", "check", "check_fractions"]
