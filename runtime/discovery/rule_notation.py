"""Loops of an operator in the notation of sharding rules."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

from autopar.errors import RuleError
from autopar.runtime.proof import Sample

from .loops import Cut, Loop


def rule_text(case: Sample, loops: Sequence[Loop]) -> str:
    """The rule of some loops: every loop is a factor, dims without a loop are whole.

    Whole dims of equal size above 1 share a name, which only says that nothing is split.
    """
    loops = _in_order(loops)
    names = dict(zip(range(len(loops)), _letters(), strict=False))
    tensors = case.graph.tensors
    shapes = [tensors[name].shape for name in (*case.operator.inputs, *case.operator.outputs)]
    count = len(case.operator.inputs)
    addends = frozenset().union(*(loop.addends for loop in loops))
    whole: dict[int, str] = {}
    spelled = []
    for index, shape in enumerate(shapes):
        dims = [_dim(index, dim, size, loops, names, whole) for dim, size in enumerate(shape)]
        spelled.append(("+" if index in addends and index < count else "") + " ".join(dims))
    text = ", ".join(spelled[:count]) + " -> " + ", ".join(spelled[count:])
    reductions: dict[str, list[str]] = {}
    for number, loop in enumerate(loops):
        if loop.reduction is not None:
            reductions.setdefault(loop.reduction, []).append(names[number])
    tail = "; ".join(f"{', '.join(members)}: {word}" for word, members in reductions.items())
    return text.strip() + (f" | {tail}" if tail else "")


def _in_order(loops: Sequence[Loop]) -> list[Loop]:
    """Sort loops by their first place in the tensors."""

    def first_place(loop: Loop) -> tuple[int, ...]:
        """The first tensor that has the loop, the dim, and the parts within which it is cut."""
        places = enumerate((*loop.inputs, *loop.outputs))
        return min((tensor, *cut) for tensor, cut in places if cut is not None)

    return sorted(loops, key=first_place)


def _letters() -> itertools.chain[str]:
    """Names of factors: a to z, then a0, a1, ..."""
    return itertools.chain(string.ascii_lowercase, (f"a{i}" for i in itertools.count()))


def _dim(
    tensor: int,
    dim: int,
    size: int,
    loops: Sequence[Loop],
    names: dict[int, str],
    whole: dict[int, str],
) -> str:
    """A dim as its loops from the outside in, with bare sizes where no loop explains it."""
    inside: list[tuple[int, int, str]] = []
    for number, loop in enumerate(loops):
        cut: Cut | None = (*loop.inputs, *loop.outputs)[tensor]
        if cut is not None and cut[0] == dim:
            inside.append((cut[1], loop.size, names[number]))
    if not inside:
        return "1" if size == 1 else "!" + whole.setdefault(size, f"w{len(whole)}")
    # From the outside in: each loop starts where the ones outside it end.
    terms: list[str] = []
    position = 1
    for parts, extent, name in sorted(inside):
        if parts % position:
            raise RuleError(f"two loops overlap in dim {dim} of tensor {tensor}")
        terms += [str(parts // position)] * (parts > position) + [name]
        position = parts * extent
    if size % position:
        raise RuleError(f"the loops of dim {dim} of tensor {tensor} do not multiply to {size}")
    terms += [str(size // position)] * (size > position)
    return terms[0] if len(terms) == 1 else f"({' '.join(terms)})"
