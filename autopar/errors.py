"""Every error that a user can cause, with its exit code and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoparError(ValueError):
    """Base of all errors caused by what a user gave; `exit_code` is the process status of the command line."""

    exit_code = 2


class UsageError(AutoparError):
    """An option, argument or call is wrong (exit code 2)."""

    exit_code = 2


class ClusterError(UsageError):
    """A cluster file or preset cannot be used (exit code 2)."""


class RuleError(UsageError):
    """A sharding rule, layout or strategy text does not follow the notation (exit code 2)."""


class ModelError(AutoparError):
    """The model cannot be read (exit code 3)."""

    exit_code = 3


class UnsupportedOperators(ModelError):
    """The model holds operators without a rule or importer; all of them are named at once (exit code 3).

    >>> print(UnsupportedOperators({"onnx.Foo": 2}, known=["onnx.Floor"]))
    the model holds 1 unsupported operator kind: onnx.Foo (2 times; nearest known: onnx.Floor)
    """

    def __init__(self, counts: dict[str, int], known: Iterable[str] = ()) -> None:
        self.counts = dict(counts)
        known = sorted(known)
        parts = []
        for kind in sorted(counts):
            near = difflib.get_close_matches(kind, known, n=1)
            times = f"{counts[kind]} time" + ("s" if counts[kind] != 1 else "")
            parts.append(f"{kind} ({times}" + (f"; nearest known: {near[0]}" if near else "") + ")")
        plural = "kind" if len(parts) == 1 else "kinds"
        super().__init__(f"the model holds {len(parts)} unsupported operator {plural}: " + ", ".join(parts))


class NoPlanFits(AutoparError):
    """No plan fits the memory of a device (exit code 4); `minimum` is the smallest that would do, in bytes."""

    exit_code = 4

    def __init__(self, message: str, *, minimum: float, limit: float) -> None:
        self.minimum = minimum
        self.limit = limit
        super().__init__(message)


class PlanError(AutoparError):
    """A strategy checkpoint cannot be read, or does not match the model, the world size or the backend (exit code 5)."""

    exit_code = 5


class RunError(AutoparError):
    """A run on the ranks, or the check against one device, failed (exit code 6)."""

    exit_code = 6


def unknown(what: str, given: object, valid: Iterable[object]) -> str:
    """The message for an unknown name: what it is, what was given, and the valid names.

    >>> unknown("optimizer", "adam", ["adamw", "none", "sgd"])
    "unknown optimizer 'adam': valid are adamw, none, sgd. Perhaps you meant 'adamw'?"
    """
    names = [str(name) for name in valid]
    near = difflib.get_close_matches(str(given), names, n=1)
    return f"unknown {what} {str(given)!r}: valid are {', '.join(names)}." + (f" Perhaps you meant {near[0]!r}?" if near else "")
