"""Models named by a `config.json` of Hugging Face: modules of transformers or diffusers.

No code of a model's repository is executed, nothing is downloaded, and planning needs no weights.
"""

from .file import DTYPE, PREFIX, content_of
from .image_tokens import placed
from .images import telling, told_sizes
from .inputs import Batch, example_inputs
from .made import Configured
from .modules import configured
from .sizes import OPTIONS, SEQUENCE

__all__ = [
    "DTYPE",
    "OPTIONS",
    "PREFIX",
    "SEQUENCE",
    "Batch",
    "Configured",
    "configured",
    "content_of",
    "example_inputs",
    "placed",
    "telling",
    "told_sizes",
]
