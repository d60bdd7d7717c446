"""Links that several clusters share: levels that name `links` take figures from `presets/links`.

A level that names them under `like` only resembles them: the source of every figure then says that
it is assumed.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from autopar.errors import ClusterError, unknown


def known_links() -> tuple[str, ...]:
    """Names of the links that come with autopar."""
    files = resources.files("autopar.costmodel").joinpath("presets", "links").iterdir()
    return tuple(
        sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))
    )


@functools.cache
def _links(name: str) -> dict[str, Any]:
    if name not in known_links():
        raise ClusterError(unknown("links", name, known_links()))
    text = (
        resources.files("autopar.costmodel")
        .joinpath("presets", "links", f"{name}.json")
        .read_text(encoding="utf-8")
    )
    links = json.loads(text)
    assert isinstance(links, dict)
    return links


def with_links(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a cluster file in which every level says all of itself."""
    levels = data.get("levels")
    # Contents of a wrong type are left as they are, for pydantic to report.
    if not isinstance(levels, list):
        return data
    return {**data, "levels": [_whole(level) for level in levels]}


def _whole(level: object) -> object:
    if not isinstance(level, dict):
        return level
    own = {key: value for key, value in level.items() if key not in ("links", "like")}
    if isinstance(level.get("links"), str):
        return {**_links(level["links"]), **own}
    if isinstance(level.get("like"), str):
        # Errors measured on other links say nothing about these.
        like = {name: value for name, value in _links(level["like"]).items() if name != "residuals"}
        return {**_assumed(like, level["like"]), **own}
    return level


def _assumed(part: Any, name: str) -> Any:
    """Figures of another device, marked as assumed, since none was measured on this one."""
    if isinstance(part, list):
        return [_assumed(one, name) for one in part]
    if not isinstance(part, dict):
        return part
    figures = {
        key: _assumed(value, name)
        for key, value in part.items()
        if not ("source" in part and key in ("error", "rows", "kind"))
    }
    return (
        {**figures, "kind": "assumed", "source": f"as {name}: {part['source']}"}
        if "source" in part
        else figures
    )
