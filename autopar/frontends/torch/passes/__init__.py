"""Records of what a forward pass runs, reads and writes while it is exported."""

from .refusing import with_facts

__all__ = ["with_facts"]
