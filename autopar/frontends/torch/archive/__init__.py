"""A `.pt2` file becomes a torch program without running any code that the file holds."""

from .reader import read_archive

__all__ = ["read_archive"]
