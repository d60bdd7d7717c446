"""Operators of torch's dispatcher in the namespace `autopar`: scans that layers write as loops."""

from . import scans as scans
