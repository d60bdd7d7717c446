"""The settings of a configuration's project in which the plan found differs from the run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.errors import UsageError
from autopar.integrations.convert import convert
from autopar.plan import Plan

Changes = dict[str, tuple[str | None, str | None]]
"""By its name the value of a setting in the run and in the plan found; None: it is not set."""
_SETTING = re.compile(r"\s*(?:\"(?P<key>[^\"]+)\"|(?P<name>[\w.-]+))(?: = |: |\s+|=)(?P<value>.*)")


def changes(run: Plan, better: Plan, target: str) -> Changes:
    """The changes in the target's file from the run to the plan found.

    {} where the target cannot say one of them, as a run may have a pipeline that it writes itself.
    """
    try:
        before, after = (dict(_settings(convert(one, target).text)) for one in (run, better))
    except UsageError:
        return {}
    return {
        name: (before.get(name), after.get(name))
        for name in (before | after)
        if before.get(name) != after.get(name)
    }


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """The settings of a file, whatever its language: a name and a value on a line."""
    for line in text.splitlines():
        if line.lstrip().startswith(("#", "def ", "return", "from ", "import ")):
            continue
        if match := _SETTING.fullmatch(f"{line} " if line.startswith("--") else line):
            name = match["key"] or match["name"]
            yield name.removeprefix("config."), match["value"].strip().rstrip(",")
