"""PyTorch modules and `torch.export` archives become graphs and the programs to run them."""

from .archive import read_archive
from .attributes import with_attributes
from .caches import NOTE, caching, on_one_device
from .cast import recast
from .folding import equal_layers
from .importer import import_torch, read_exported
from .own_backward import none_of_its_own

__all__ = [
    "NOTE",
    "caching",
    "equal_layers",
    "import_torch",
    "none_of_its_own",
    "on_one_device",
    "read_archive",
    "read_exported",
    "recast",
    "with_attributes",
]
