"""The errors that a user can cause, with their exit codes and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class AutoparError(ValueError):
    """Base of all errors caused by the user's input.

    `exit_code` is the process status of the command line.
    """

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


NEAR = 0.7
"""The least similarity of two operator names at which one is suggested for the other; 1 is equal.
"""


class UnsupportedOperators(ModelError):
    """The model holds operators without a rule or importer.

    All of them are named at once (exit code 3).

    `remedy`: a sentence on what to do next.

    >>> print(UnsupportedOperators({"onnx.Foo": 2}, known=["onnx.Floor"]))
    the model holds 1 unsupported operator kind: onnx.Foo (2 times; nearest known: onnx.Floor)
    """

    def __init__(
        self, counts: Mapping[str, int], known: Iterable[str] = (), *, remedy: str = ""
    ) -> None:
        self.counts = dict(counts)
        known = list(known)
        parts = []
        for kind in sorted(counts):
            near = nearest_kinds(kind, known)
            parts.append(
                f"{kind} ({times(counts[kind])}"
                + (f"; nearest known: {', '.join(near)}" if near else "")
                + ")"
            )
        plural = "kind" if len(parts) == 1 else "kinds"
        message = f"the model holds {len(parts)} unsupported operator {plural}: " + ", ".join(parts)
        super().__init__(f"{message}. {remedy}" if remedy else message)


class DiscoveryError(ModelError):
    """The sharding rule of an operator cannot be found by executing it (exit code 3)."""


class NoPlanFits(AutoparError):
    """No plan fits the memory of a device (exit code 4).

    `minimum`: the smallest `memory_limit` that would do, in bytes.
    """

    exit_code = 4

    def __init__(self, message: str, *, minimum: float, memory_limit: float) -> None:
        self.minimum = minimum
        self.memory_limit = memory_limit
        super().__init__(message)


class PlanError(AutoparError):
    """A strategy checkpoint is unreadable or does not match (exit code 5).

    It may be for another model, another number of ranks or another backend.
    """

    exit_code = 5


class RunError(AutoparError):
    """A run on the ranks, or the check against one device, failed (exit code 6)."""

    exit_code = 6


class NoisyMeasurement(RunError):
    """Repeats of a measurement differ too much for anything to be learned from it (exit code 6)."""


def nearest_kinds(kind: str, known: Iterable[str], count: int = 2) -> list[str]:
    """The known operator kinds with the names most similar to that of `kind`.

    Names are compared without library and overload.

    >>> nearest_kinds("mylib.Rellu", ["onnx.Relu", "aten.relu.default", "aten.mul.Tensor"])
    ['aten.relu.default', 'onnx.Relu']
    """

    def bare(
        name: str,
    ) -> str:  # library.name.overload, or a domain (which may have dots) and a Name
        parts = name.split(".")
        return parts[1 if len(parts) == 3 and parts[1][:1].islower() else -1].lower()

    scored = [
        (difflib.SequenceMatcher(None, bare(kind), bare(other)).ratio(), other) for other in known
    ]
    close = sorted(
        (-score, other.split(".")[0] != kind.split(".")[0], other)
        for score, other in scored
        if score > NEAR
    )
    return [other for _, _, other in close[:count]]


def times(count: int) -> str:
    """A number of times, in words.

    >>> times(1), times(3)
    ('1 time', '3 times')
    """
    return f"{count} time" + ("s" if count != 1 else "")


def unknown(what: str, given: object, valid: Iterable[object]) -> str:
    """The message for an unknown name of a `what`, with the valid names.

    >>> unknown("optimizer", "adam", ["adamw", "none", "sgd"])
    "unknown optimizer 'adam': valid are adamw, none, sgd. Perhaps you meant 'adamw'?"
    """
    names = [str(name) for name in valid]
    near = difflib.get_close_matches(str(given), names, n=1)
    return f"unknown {what} {str(given)!r}: valid are {', '.join(names)}." + (
        f" Perhaps you meant {near[0]!r}?" if near else ""
    )
