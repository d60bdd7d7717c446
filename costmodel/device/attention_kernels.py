"""Attention kernels by the names of frameworks, and the stand-in for one that a device lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.errors import ClusterError, unknown

from .device import Device

GENERATIONS = ("flash1", "flash2", "flash3", "cudnn")
"""Frameworks' names of attention kernels, the slowest first."""
FORWARD: Mapping[str, tuple[str, float]] = {"triton": ("flash1", 1.4 / 2)}
"""Kernels that are like another one backward, with their share of its seconds forward.

FlashAttention written in Triton: FlashAttention-2 is twice as fast as both backward; forward it is
1.3 to 1.5 times as fast as this one, and twice as fast as the other (arXiv:2307.08691, section
4.1).
"""


def alike(kernel: str, direction: str = "backward") -> tuple[str, float]:
    """The kernel whose seconds stand for `kernel`, and the share of them.

    >>> alike("triton", "forward"), alike("triton"), alike("flash2", "forward")
    (('flash1', 0.7), ('flash1', 1.0), ('flash2', 1.0))
    """
    name, share = FORWARD.get(kernel, (kernel, 1.0))
    return name, share if direction == "forward" else 1.0


def standing_for(kernel: str, known: Collection[str], where: str) -> str:
    """The kernel that prices `kernel`: itself, or the nearest `known` one, a slower one first.

    >>> standing_for("cudnn", ("flash1", "flash2"), "here"), standing_for("flash1", ["cudnn"], "")
    ('flash2', 'cudnn')
    """
    if kernel in known:
        return kernel
    if kernel not in GENERATIONS or not known:
        raise ClusterError(f"{where}: " + unknown("attention kernel", kernel, known))
    place = GENERATIONS.index(kernel)
    slower = [name for name in GENERATIONS[:place] if name in known]
    faster = [name for name in GENERATIONS[place:] if name in known]
    if not slower and not faster:
        raise ClusterError(f"{where}: " + unknown("attention kernel", kernel, known))
    return slower[-1] if slower else faster[0]


def price_of_attention(kernel: str, device: Device) -> str:
    """The stand-in for a framework's kernel, in words; empty where it was measured itself."""
    where = f"device {device.name!r}"
    kernel = alike(kernel)[0]
    if device.kernels is None:
        known = {name.partition(".")[0] for name in device.attention}
        if not known:
            return f"{kernel} is priced at the rate of products, as no attention was measured"
        stand_in = standing_for(kernel, known, where)
        return "" if stand_in == kernel else f"{kernel} is priced as {stand_in}"
    stand_in = standing_for(kernel, device.kernels.generations, where)
    entry = device.kernels.generations[stand_in]
    if stand_in == kernel and not entry.source.startswith("assumed"):
        return ""
    return f"{kernel} is priced as {entry.kernel} ({entry.source})"
