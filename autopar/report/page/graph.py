"""The model's graph folded by module, with boxes coloured by strategy.

Equal layers are drawn once, and values flow downwards.

Each box is one row below the lowest box that feeds it (the longest path from the inputs). A value
for the next of equal layers flows back, and is a line around the left side. If there are too many
operators, boxes are modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from autopar.plan import Plan
from autopar.printable import printable

from .drawing import COLOURS
from .modules import Leaf, Tree, tokens
from .shapes import Picture, line, nothing, picture, rectangle, short, text

MOST_BOXES = 110
MOST_BESIDE = 5
"""The most boxes of one row; further boxes are in the next row."""
LETTERS = "ABCDEFGHIJ"
BOX = 168.0
HIGH = 26.0
GAP = 16.0
LEFT = 150.0
RIGHT = 14.0
WIDE = 1070.0
LAYER = re.compile(r"(?<![^./])\d+(?![^./])")
Path = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Box:
    """Operators drawn as one box: their first row in the tree, and their number by colour."""

    path: Path
    row: int
    names: list[str] = field(default_factory=list)
    count: int = 0
    colours: Counter[int] = field(default_factory=Counter)
    rank: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path[-1] if self.path else "all operators"


def graph(plan: Plan, tree: Tree) -> Picture:
    """The picture; each box is a link to its row in the tree of operators."""
    boxes, of = _boxes(tree.leaves, {name: place for place, name in enumerate(plan.operators)})
    told = (
        f"Graph of the model in {len(boxes)} boxes: values flow downwards, dashed lines lead to "
        "the next layer"
    )
    if not boxes:
        return nothing(told)
    forward, back = _edges(plan, of)
    order = {path: place for place, path in enumerate(boxes)}
    for a, b in sorted(forward, key=lambda edge: order[edge[1]]):
        boxes[b].rank = max(boxes[b].rank, boxes[a].rank + 1)
    height = _place(list(boxes.values()))
    out = [
        _edge(boxes[a], boxes[b])
        for a, b in sorted(forward, key=lambda edge: (order[edge[0]], order[edge[1]]))
    ]
    out += [_around(boxes[a], boxes[b], n) for n, (a, b) in enumerate(sorted(back))]
    out += [_box(box) for box in boxes.values()]
    return picture(
        told, (WIDE, height + 10), [*out, *_module_names(list(boxes.values()))], role="group"
    )


def _boxes(
    leaves: Sequence[Leaf], order: Mapping[str, int]
) -> tuple[dict[Path, Box], dict[str, Path]]:
    """The boxes in the order of the model, and the box of every operator.

    They are as deep in the tree as there is room for.
    """
    parts = sorted(
        (part for leaf in leaves for part in _parts(leaf)),
        key=lambda part: order.get(part[2][0], 0),
    )
    while len({path for path, _, _ in parts}) > MOST_BOXES:
        # Join the deepest boxes to their modules, level by level.
        deepest = max(len(path) for path, _, _ in parts)
        if deepest == 1:
            parts = parts[:MOST_BOXES]
            break
        parts = [
            (path if len(path) < deepest else path[:-1], leaf, members)
            for path, leaf, members in parts
        ]
    boxes: dict[Path, Box] = {}
    of: dict[str, Path] = {}
    for path, leaf, members in parts:
        box = boxes.setdefault(
            path, Box(path=tuple(part.partition("\0")[0] for part in path), row=leaf.number)
        )
        box.names.append("/".join((*leaf.path, leaf.name)))
        box.count += len(members)
        box.colours[leaf.colour] += len(members)
        of.update(dict.fromkeys(members, path))
    return boxes, of


def _parts(leaf: Leaf) -> list[tuple[Path, Leaf, list[str]]]:
    """The operators of a row, apart where numbers in names are not of layers.

    So ln_1 and ln_2 are two.
    """
    by_name: dict[str, list[str]] = {}
    for name in leaf.members:
        by_name.setdefault(LAYER.sub("", name), []).append(name)
    parts = []
    for members in by_name.values():
        *path, last = tokens(members[0].strip("/")) if len(by_name) > 1 else (*leaf.path, leaf.name)
        shown = [*leaf.path[: len(path) - 1], *path[-1:]] if len(by_name) > 1 else path
        # The number, which is not shown, keeps boxes of one name in several rows apart.
        parts.append(((*shown, f"{last}\0{leaf.number}"), leaf, members))
    return parts


def _edges(
    plan: Plan, of: dict[str, Path]
) -> tuple[set[tuple[Path, Path]], set[tuple[Path, Path]]]:
    """The pairs of boxes joined by a value: downwards, and back to the next layer."""
    makers = {
        tensor: name for name, operator in plan.operators.items() for tensor, _ in operator.outputs
    }
    places = {path: place for place, path in enumerate(dict.fromkeys(of.values()))}
    forward: set[tuple[Path, Path]] = set()
    back: set[tuple[Path, Path]] = set()
    for name, operator in plan.operators.items():
        for tensor, _ in operator.inputs:
            a = of.get(makers.get(tensor, ""))
            b = of.get(name)
            if a is not None and b is not None and a != b:
                (forward if places[a] < places[b] else back).add((a, b))
    return forward, back


def _place(boxes: Sequence[Box]) -> float:
    """Place the boxes, rank by rank; returns the height of the picture."""
    y = 6.0
    for rank in range(max(box.rank for box in boxes) + 1):
        beside = [box for box in boxes if box.rank == rank]
        for first in range(0, len(beside), MOST_BESIDE):
            row = beside[first : first + MOST_BESIDE]
            for number, box in enumerate(row):
                box.x = LEFT + number * (BOX + RIGHT)
                box.y = y
            y += HIGH + GAP
    return y


def _box(box: Box) -> Markup:
    colour = box.colours.most_common(1)[0][0]
    several = f", and {len(box.colours) - 1} other strategies" if len(box.colours) > 1 else ""
    title = f"{LETTERS[colour]} {_label(box)}: {'/'.join(box.path)}, {box.count} operators{several}"
    drawn = Markup(
        '<rect class="box" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="#fff" '
        'stroke="#444"/>'
    ).format(box.x, box.y, BOX, HIGH)
    drawn += rectangle(box.x, box.y, 20, HIGH, COLOURS[colour]) + text(
        box.x + 10, box.y + 17, LETTERS[colour], anchor="middle", over=True
    )
    drawn += text(box.x + 25, box.y + 17, _label(box))
    return Markup('<a href="#op-{}" data-names="{}">{}<title>{}</title></a>').format(
        box.row, printable("\n".join(box.names)), drawn, printable(title, lines=False)
    )


def _label(box: Box) -> str:
    return short(f"{box.name}{f' x{box.count}' if box.count > 1 else ''}", 22)


def _edge(a: Box, b: Box) -> Markup:
    """A straight line from a box's lower edge to a box further down.

    There is none to any other box.
    """
    return (
        line(a.x + BOX / 2, a.y + HIGH, b.x + BOX / 2, b.y, arrow=True) if a.y < b.y else Markup("")
    )


def _around(a: Box, b: Box, number: int) -> Markup:
    # Four tracks side by side, so that lines do not cover one another.
    x = LEFT - 8 - 5 * (number % 4)
    y0 = a.y + HIGH / 2
    y1 = b.y + HIGH / 2
    outline = (
        line(a.x, y0, x, y0, style="dashed")
        + line(x, y0, x, y1, style="dashed")
        + line(x, y1, b.x, y1, style="dashed", arrow=True)
    )
    return outline + (
        text(x - 14, (y0 + y1) / 2, "next layer", anchor="end") if number == 0 else Markup("")
    )


def _module_names(boxes: Iterable[Box]) -> list[Markup]:
    """The path of each row's first box, if it differs from that of the row above."""
    names = []
    last = ""
    y = -1.0
    for box in sorted(boxes, key=lambda box: (box.y, box.x)):
        module = "/".join(box.path[:-1])
        if box.y != y and module != last:
            names.append(text(2, box.y + 17, short(module, 20)))
            last = module
        y = box.y
    return names
