"""Models named by a `config.json` of Hugging Face: modules of transformers or diffusers.

No code of a model's repository is executed, nothing is downloaded, and planning needs no weights.
"""

from .file import DTYPE, PREFIX, File, content_of, read_configuration
from .image_tokens import placed
from .images import telling, told_sizes
from .inputs import Batch, example_inputs
from .made import Configured
from .modules import configured
from .sizes import OPTIONS, SEQUENCE
from .small import drawn, small_files, small_inputs

__all__ = [
    "DTYPE",
    "OPTIONS",
    "PREFIX",
    "SEQUENCE",
    "Batch",
    "Configured",
    "File",
    "configured",
    "content_of",
    "drawn",
    "example_inputs",
    "placed",
    "read_configuration",
    "small_files",
    "small_inputs",
    "telling",
    "told_sizes",
]
