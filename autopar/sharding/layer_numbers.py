"""The numbers of a model's layers, read in the names of its operators, and the places between."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"(?:^|[./])(\d+)(?=[./])")


def layer_of(name: str) -> int | None:
    """The number of the layer that an operator is in; None where its name has none.

    >>> layer_of("model.layers.11.mlp.experts.3.up/linear"), layer_of("lm_head/linear")
    (11, None)
    """
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def by_layer(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The names of each layer that has some.

    >>> by_layer(["embed", "h.0.q", "h.0.k", "h.1.q", "norm"])
    (('h.0.q', 'h.0.k'), ('h.1.q',))
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        if match := _LAYER.search(name):
            layers.setdefault(name[: match.end()], []).append(name)
    return tuple(map(tuple, layers.values()))


def between_layers(operators: Iterable[tuple[str, bool]]) -> tuple[range, ...]:
    """For each place between two layers, the operators before one of which the second may begin.

    `operators`: the name of each, and whether it is a product: a layer is all from its first
    product to its last. Layers of a decoder may follow those of an encoder. () where the numbers
    do not ascend one by one from 0.

    >>> names = ["h.0/linear", "h.0/add", "h.1/norm", "h.1/linear", "norm"]
    >>> between_layers((name, "linear" in name) for name in names)
    (range(1, 4),)
    """
    places: list[range] = []
    last = -1
    layer = -1
    for place, (name, is_product) in enumerate(operators):
        number = layer_of(name)
        if number is None or not is_product:
            continue
        if number not in (layer, layer + 1) and not (number == 0 and layer >= 1):
            return ()
        if number != layer >= 0:
            places.append(range(last + 1, place + 1))
        layer = number
        last = place
    return tuple(places)


def around_layers(operators: Sequence[tuple[str, bool]]) -> tuple[range, range]:
    """The operators before one of which the first layer may begin, and what is after the last.

    `operators`: as in `between_layers`; some are in layers.

    >>> names = ["embed", "h.0/norm", "h.0/linear", "h.1/linear", "norm", "head/linear"]
    >>> around_layers([(name, "linear" in name) for name in names])
    (range(1, 3), range(4, 6))
    """
    numbered = [layer_of(name) is not None for name, _ in operators]
    products = [place for place, (_, is_product) in enumerate(operators) if is_product]
    inside = [place for place in products if numbered[place]]
    head = next((place for place in products if place > inside[-1]), len(operators) - 1)
    return range(numbered.index(True), inside[0] + 1), range(inside[-1] + 1, head + 1)
