"""Where the stages of a plan are cut, as modules of the model at whose beginning or end they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError
from ..plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Between two stages: at the `point` of the module, or `why` there is none."""

    module: str = ""
    point: Literal["BEGINNING", "END"] = "BEGINNING"
    why: str = ""


def split_points(plan: Plan) -> tuple[Cut, ...]:
    """Where each stage but the first begins; a `PlanError` where a plan's stages do not follow one another."""
    names = list(plan.operators)
    modules = [name.rpartition("/")[0] for name in names]
    places = {name: index for index, name in enumerate(names)}
    starts = [places.get(stage.first, -1) for stage in plan.stages]
    if starts[:1] != [0] or any(after <= before for before, after in itertools.pairwise(starts)):
        raise PlanError("the plan's stages do not begin at operators of the model, one after the other")
    return tuple(_cut(names, modules, start) for start in starts[1:])


def _cut(names: Sequence[str], modules: Sequence[str], at: int) -> Cut:
    """The outermost module that is called and whose operators, all in one piece, begin or end here.

    >>> names = ["a/x", "b.0.c/x", "b.0/x", "b.0/y"]
    >>> modules = ["a", "b.0.c", "b.0", "b.0"]
    >>> [(cut.module, cut.point) for cut in (_cut(names, modules, at) for at in (1, 2, 3))]
    [('b.0', 'BEGINNING'), ('b.0.c', 'END'), ('', 'BEGINNING')]
    """
    called = set(modules)  # those with operators of their own are, where lists of modules are not
    for module in _outwards_in(modules[at]):
        held = [index for index, name in enumerate(modules) if _within(name, module)]
        if module in called and held == list(range(at, at + len(held))):
            return Cut(module=module)
    for module in _outwards_in(modules[at - 1]):
        held = [index for index, name in enumerate(modules) if _within(name, module)]
        if module in called and held == list(range(at - len(held), at)):
            return Cut(module=module, point="END")
    inside = modules[at] or "the model itself"
    return Cut(why=f"a stage cut inside a module, at {names[at]!r} in {inside!r}, where no module begins or ends")


def _outwards_in(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
