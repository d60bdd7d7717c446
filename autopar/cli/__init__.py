"""The command line: a shell's words come in; texts, files and an exit code go out."""

from .entry import COMMANDS, main, run

__all__ = ["COMMANDS", "main", "run"]
