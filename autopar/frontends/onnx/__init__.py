"""ONNX models become graphs, without torch; their weights are read one tensor at a time."""

from .importer import import_onnx
from .model import read_model
from .roles import Roles
from .specialised import specialised
from .weights import external_files, has_weights, load_weights, missing_weights

__all__ = [
    "Roles",
    "external_files",
    "has_weights",
    "import_onnx",
    "load_weights",
    "missing_weights",
    "read_model",
    "specialised",
]
