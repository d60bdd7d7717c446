"""Models named by a `config.json` of Hugging Face: the module that transformers has for its type.

No code of a model's repository is executed, nothing is downloaded, and planning needs no weights.
"""

from .inputs import SEQUENCE, example_inputs
from .modules import Configured, configured

__all__ = ["SEQUENCE", "Configured", "configured", "example_inputs"]
