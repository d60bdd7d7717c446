"""The memory of this machine, asked without torch."""

from __future__ import annotations

import os


def local_memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not tell, as Windows does not."""
    if not hasattr(os, "sysconf"):
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
