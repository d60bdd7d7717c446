"""Mesh axes by dim, as Shardy and JAX write them.

<@mesh, [{"x", "y"}, {}], unreduced={"z"}>
PartitionSpec(('x', 'y'), None)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from autopar.errors import RuleError, unknown
from autopar.sharding.layout import Kind, Layout

from .place import Place, as_tuple, axes_of, no_partial, only_sums, whole_splits

_SHARDY = re.compile(
    r"(?:#sdy\.sharding)?<@\w+, *\[(?P<dims>.*?)\]"
    r"(?:, *replicated=\{(?P<replicated>[^}]*)\})?(?:, *unreduced=\{(?P<unreduced>[^}]*)\})?>"
)
_AXIS = re.compile(r'"(?P<name>[^"]+)"(?P<part>:\(\d+\)\d+)?')
_SPEC = re.compile(r"(?:jax\.sharding\.)?(?:PartitionSpec|P)\((?P<entries>.*)\)", re.DOTALL)


def write(layout: Layout, place: Place) -> str:
    """Axes that split nothing are free to be replicated, which Shardy leaves unsaid."""
    whole_splits(layout, "Shardy")
    only_sums(layout, "Shardy")

    def quoted(axes: Sequence[int]) -> str:
        return "{" + ", ".join(f'"{place.names[axis]}"' for axis in axes) + "}"

    partial = [axis for axis, placement in enumerate(layout) if placement.kind is Kind.PARTIAL]
    dims = ", ".join(quoted(axes) for axes in axes_of(layout, place.rank))
    if partial:
        return f"<@mesh, [{dims}], unreduced={quoted(partial)}>"
    return f"<@mesh, [{dims}]>"


def read(text: str, place: Place) -> Layout:
    """The layout of closed dims of whole axes; an open dim or a part of an axis is refused."""
    match = _SHARDY.fullmatch(text.strip())
    if match is None:
        raise RuleError(f'{text!r} is not of the form <@mesh, [{{"x"}}, {{}}], unreduced={{"z"}}>')
    groups = re.findall(r"\{([^}]*)\}", match["dims"])
    if "?" in match["dims"]:
        raise RuleError(
            f"{text!r}: an open dim (?) leaves a choice to the compiler, a layout leaves none: "
            "close it, or let autopar search"
        )
    _require_rank(len(groups), place, text)
    dims = [_axes(group, place, text) for group in groups]
    return place.from_dims(dims, _axes(match["unreduced"] or "", place, text), text=text)


def _axes(text: str, place: Place, whole: str) -> list[int]:
    axes = []
    if left := re.sub(r"[\s,]", "", _AXIS.sub("", text)):
        raise RuleError(f"{whole!r}: {left!r} is no quoted name of a mesh axis")
    for match in _AXIS.finditer(text):
        if match["part"]:
            raise RuleError(
                f"{whole!r}: {match[0]} is a part of a mesh axis; give the mesh an axis of that "
                "size"
            )
        axes.append(_axis(match["name"], place))
    return axes


def _axis(name: object, place: Place) -> int:
    if name not in place.names:
        raise RuleError(unknown("mesh axis", name, place.names))
    return place.names.index(str(name))


def _require_rank(count: int, place: Place, text: str) -> None:
    if count > place.rank:
        raise RuleError(f"{text!r} has {count} dims, the tensor has {place.rank}")


def write_spec(layout: Layout, place: Place) -> str:
    """The layout as the text of JAX's `PartitionSpec`."""
    whole_splits(layout, "JAX's PartitionSpec")
    no_partial(
        layout,
        "JAX's PartitionSpec",
        "shardy's unreduced={...} can say it; else give it as it is after its sum (R)",
    )
    entries = []
    for axes in axes_of(layout, place.rank):
        names = tuple(place.names[axis] for axis in axes)
        if len(names) > 1:
            entries.append(repr(names))
        else:
            entries.append(repr(names[0]) if names else "None")
    return f"PartitionSpec{as_tuple(entries)}"


def read_spec(text: str, place: Place) -> Layout:
    """Dims that are not named are whole."""
    match = _SPEC.fullmatch(text.strip())
    entries = _entries(match["entries"]) if match else None
    if entries is None:
        raise RuleError(f"{text!r} is not of the form PartitionSpec('x', None, ('y', 'z'))")
    _require_rank(len(entries), place, text)
    dims = []
    for entry in entries:
        names = entry if isinstance(entry, tuple) else (entry,)
        dims.append([_axis(name, place) for name in names if entry is not None])
    return place.from_dims(dims, text=text)


def _entries(text: str) -> tuple[object, ...] | None:
    """The arguments in a call's parentheses; None if they are no literals."""
    # A trailing comma makes a single entry a tuple; where one is written already, it is too many.
    for written in (f"({text},)", f"({text})"):
        try:
            value = ast.literal_eval(written if text.strip(" ,") else "()")
        except (SyntaxError, ValueError):
            continue
        return value if isinstance(value, tuple) else None
    return None
