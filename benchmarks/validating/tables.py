"""The page's tables of what is left out: intervals, sources, devices, and what ran out of memory.

All follow from the record alone (`record.py`), so that a test can make them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .held_out import HeldOut, of_memory, of_steps
from .scores import Group, Sample
from .variants import AS_IT_RAN, NO_KERNELS, Priced

ENOUGH = 10
"""Rows of a class that a share needs."""
HELD = 0.85
"""The least share of a class's rows that its interval should hold."""


def tables(priced: Priced) -> str:
    """All tables, in Markdown."""
    parts = (intervals(priced), classes(priced), sources(priced), devices(priced), memory(priced))
    return "\n\n".join("\n".join(lines) for lines in parts)


def intervals(priced: Priced) -> list[str]:
    """The intervals of prices by what is known of a run, and how far they hold in each source."""
    lines = [
        "## Intervals",
        "",
        "Nine runs in ten lie between these multiples of their prediction. *As it ran*: by the",
        "habits of its framework and measured kernels. *No profile*: by the habits that most",
        "frameworks share. *Data sheet*: by kernels that saw no row of the device. *Inside*: rows",
        "of a source that are in the interval of all others, in the mean over sources; *least*:",
        "the source that has the fewest.",
        "",
        *_head("priced", "runs", "sources", "rows", "interval", "median", "inside", "least"),
    ]
    for how, groups in priced.items():
        for kind, held in of_steps(groups).items():
            lines.append(_row(how, kind, *_held(held)))
    if held_memory := of_memory(priced[AS_IT_RAN]):
        lines.append(_row(AS_IT_RAN, "peaks of memory", *_held(held_memory)))
    return lines


def _held(held: HeldOut) -> Iterator[str]:
    low, middle, high = (
        f"{math.exp(x):.2f}" for x in (held.residual.low, held.residual.middle, held.residual.high)
    )
    worst = min(held.inside, key=held.inside.__getitem__)
    yield from (str(len(held.inside)), str(held.residual.rows), f"{low} to {high}", middle)
    yield from (_percent(held.coverage), f"{worst} {_percent(held.inside[worst])}")


def classes(priced: Priced) -> list[str]:
    """Rows inside the interval of all other sources, by what else is known of them."""
    lines = [
        "Rows inside the interval of all other sources, by classes of runs:",
        "",
        *_head("priced", "class", "rows", "inside"),
    ]
    narrow = []
    for how, groups in priced.items():
        inside = list(_inside(groups))
        for name, member in CLASSES.items():
            own = [one for sample, one in inside if member(sample)]
            if len(own) < ENOUGH:
                continue
            share = float(np.mean(own))
            lines.append(_row(how, name, str(len(own)), _percent(share)))
            if share < HELD:
                narrow.append(f"{name} ({how})")
    told = ", ".join(narrow) or "none"
    return [*lines, "", f"Classes whose interval is too narrow (below {_percent(HELD)}): {told}."]


def _of_scale(low: float, high: float) -> Callable[[Sample], bool]:
    return lambda sample: low < sample.scale.get("devices", 0.0) <= high


def _of_device(name: str) -> Callable[[Sample], bool]:
    return lambda sample: sample.device == name


SCALES: Mapping[str, tuple[float, float]] = {
    "1 to 8 devices": (0, 8),
    "9 to 64 devices": (8, 64),
    "65 to 512 devices": (64, 512),
    "more than 512 devices": (512, math.inf),
}
CLASSES: Mapping[str, Callable[[Sample], bool]] = {
    **{name: _of_scale(*ends) for name, ends in SCALES.items()},
    **{name: _of_device(name) for name in ("A100", "H100", "B200", "B300", "GB200", "GB300")},
}
"""Classes of runs beside their kinds."""


def _inside(groups: Sequence[Group]) -> Iterator[tuple[Sample, bool]]:
    """Every row of a kind of runs, and whether the interval of all other sources holds it."""
    for kind, held in of_steps(groups).items():
        for group in groups:
            if group.name not in held.others:
                continue
            low, high = held.others[group.name]
            for sample in group.samples:
                if sample.kind == kind and sample.measured and sample.predicted:
                    yield sample, low <= math.log(sample.measured / sample.predicted) <= high


def sources(priced: Priced) -> list[str]:
    """Each source, beside the others' interval of its kinds of runs."""
    groups = priced[AS_IT_RAN]
    inside = {group.name: list[bool]() for group in groups}
    for kind, held in of_steps(groups).items():
        for name, (low, high) in held.others.items():
            group = next(one for one in groups if one.name == name)
            logs = [log for s in group.samples if s.kind == kind for log in _log(s)]
            inside[name] += [low <= log <= high for log in logs]
    held_memory = of_memory(groups)
    lines = [
        "## Sources left out",
        "",
        "*Mean*, *bias*: errors of a source's rows. *Inside*: its rows in the interval of all",
        "other sources, of steps and of peaks of memory.",
        "",
        *_head("source", "rows", "mean", "bias", "steps inside", "memory inside"),
    ]
    for group in groups:
        errors = [math.exp(-log) - 1 for sample in group.samples for log in _log(sample)]
        if not inside[group.name]:
            continue
        within = (held_memory.inside if held_memory else {}).get(group.name)
        lines.append(
            _row(
                group.name,
                str(len(errors)),
                _percent(float(np.mean(np.abs(errors))), 1),
                _percent(float(np.mean(errors)), 1, "+"),
                _percent(float(np.mean(inside[group.name]))),
                "-" if within is None else _percent(within),
            )
        )
    return lines


def _log(sample: Sample) -> Iterator[float]:
    """The logarithm of measured over predicted, if there are both."""
    if sample.measured and sample.predicted:
        yield math.log(sample.measured / sample.predicted)


def devices(priced: Priced) -> list[str]:
    """The same rows of a device by its own kernels and by those of a fit without it."""
    own = {
        (group.name, sample.label): sample
        for group in priced[AS_IT_RAN]
        for sample in group.samples
    }
    errors: dict[str, list[tuple[float, float]]] = {}
    for group in priced.get(NO_KERNELS, ()):
        for sample in group.samples:
            beside = own.get((group.name, sample.label))
            if beside is None:
                continue
            for mine, theirs in zip(_log(beside), _log(sample), strict=True):
                pair = (math.exp(-mine) - 1, math.exp(-theirs) - 1)
                errors.setdefault(sample.device, []).append(pair)
    lines = [
        "## Devices left out",
        "",
        "The same runs, by kernels measured on the device and by its data sheet, from all other",
        "devices' kernels (V100, L4 and A10G are in no such fit).",
        "",
        *_head("device", "rows", "measured: mean", "bias", "left out: mean", "bias"),
    ]
    for device, pairs in sorted(errors.items()):
        if len(pairs) < ENOUGH:
            continue
        figures = [
            _percent(float(np.mean(of)), 1, sign)
            for column in np.transpose(pairs)
            for of, sign in ((np.abs(column), ""), (column, "+"))
        ]
        lines.append(_row(device, str(len(pairs)), *figures))
    return lines


def memory(priced: Priced) -> list[str]:
    """Rows of what was told of runs that ran, and of those that ran out of memory."""
    lines = [
        "## Out of memory",
        "",
        "*Would fit*: runs that ran, and those of them that are told not to fit. *Ran out*: runs",
        "that did not, and those of them that are told so.",
        "",
        *_head("source", "ran", "told not to fit", "ran out", "told so"),
    ]
    every = [group for group in priced[AS_IT_RAN] if any(_told(s) for s in group.samples)]
    samples = [sample for group in every for sample in group.samples if _told(sample)]
    for name, members in [
        *((group.name, [s for s in group.samples if _told(s)]) for group in every),
        ("all", samples),
    ]:
        ran = [bool(s.told_oom) for s in members if not s.was_oom]
        out = [bool(s.told_oom) for s in members if s.was_oom]
        if name == "all" or out or any(ran):
            lines.append(_row(name, str(len(ran)), _share(ran), str(len(out)), _share(out)))
    return lines


def _told(sample: Sample) -> bool:
    return sample.told_oom is not None and sample.was_oom is not None


def _share(flags: Sequence[bool]) -> str:
    return _percent(float(np.mean(flags)), 1) if flags else "-"


def _head(*names: str) -> tuple[str, str]:
    return _row(*names), f"|{'---|' * len(names)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: float, digits: int = 0, sign: str = "") -> str:
    return f"{value:{sign}.{digits}%}".replace("%", " %")
