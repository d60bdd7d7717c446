"""The diagnosis of `autopar doctor` in lines and tables, and as an object for bug reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from autopar.analysis.measurements import machine
from autopar.analysis.measurements.doctor import Diagnosis
from autopar.report.printing import Table
from autopar.units import bytes_text, rate_text, seconds_text

DEVICE_COLUMNS = ("name", "memory", "free")
"""The properties of a device that open its line, or change too fast to be worth a word."""


def machine_json() -> dict[str, Any]:
    """The machine by its own account, as an object."""
    return {
        "versions": machine.versions(),
        "backends": machine.backends(),
        "devices": machine.devices(),
        "links": machine.links(),
        "environment": machine.environment(),
    }


def report_text(diagnosis: Diagnosis | None, failure: str = "") -> str:
    """The file of a report: all results, or why there are none, without names of this machine."""
    results = {"ok": False} if diagnosis is None else diagnosis_json(diagnosis)
    answer = {**machine_json(), **results, "failure": failure}
    return machine.scrubbed(json.dumps(answer, indent=1)) + "\n"


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All results as an object, for programs."""
    bandwidth = [
        {"collective": kind, "bytes": nbytes, "seconds": seconds, "bus_bandwidth": rate}
        for kind, nbytes, seconds, rate in diagnosis.bandwidth
    ]
    return {
        "ok": diagnosis.ok,
        **machine_json(),
        "backend": diagnosis.backend,
        "ranks": diagnosis.ranks,
        "parity": [dataclasses.asdict(parity) for parity in diagnosis.parity],
        "bandwidth": bandwidth,
        "bandwidth_missing": diagnosis.silent,
    }


def diagnosis_parts(diagnosis: Diagnosis) -> list[str | Table]:
    """All results in lines and tables."""
    parts: list[str | Table] = [
        *_named_values(),
        *(_device_line(number, device) for number, device in enumerate(machine.devices())),
        *(_link_text(name, text) for name, text in machine.links().items()),
        _parity_table(diagnosis),
    ]
    if diagnosis.bandwidth:
        parts.append(_bandwidth_table(diagnosis))
    if diagnosis.silent:
        parts.append(diagnosis.silent)
    if diagnosis.ok:
        parts.append("plans run here as on one device")
    else:
        parts.append(
            "plans do not run here as on one device: send us the file of autopar doctor --report "
            "FILE"
        )
    return parts


def _named_values() -> list[str]:
    """A line for the versions, the backends and the environment, where there are any."""
    groups = {
        "versions": machine.versions(),
        "backends": machine.backends(),
        "environment": machine.environment(),
    }
    return [
        f"{title} " + ", ".join(f"{name} {value}" for name, value in values.items())
        for title, values in groups.items()
        if values
    ]


def _device_line(number: int, device: Mapping[str, Any]) -> str:
    properties = ", ".join(
        f"{name} {value}" for name, value in device.items() if name not in DEVICE_COLUMNS
    )
    return f"device {number} {device['name']}, {bytes_text(device['memory'])}, {properties}"


def _link_text(name: str, text: str) -> str:
    """A name with its text, which starts on a line of its own if it has several."""
    return f"{name}\n{text}" if "\n" in text else f"{name} {text}"


def _parity_table(diagnosis: Diagnosis) -> Table:
    rows = tuple(
        (parity.plan, "yes" if parity.ok else "NO", seconds_text(parity.seconds), parity.said)
        for parity in diagnosis.parity
    )
    return Table(
        title=f"As one device, {diagnosis.ranks} ranks, {diagnosis.backend}",
        columns=("plan", "equal", ">time", "beside one device"),
        rows=rows,
    )


def _bandwidth_table(diagnosis: Diagnosis) -> Table:
    rows = tuple(
        (kind, bytes_text(nbytes), seconds_text(seconds), rate_text(rate, "B/s"))
        for kind, nbytes, seconds, rate in diagnosis.bandwidth
    )
    columns = ("collective", ">bytes", ">time", ">bus bandwidth")
    return Table(title="Collectives", columns=columns, rows=rows)
