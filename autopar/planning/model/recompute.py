"""The operators of a model that are recomputed: modes, and modules of a layer by name.

    none        nothing
    selective   stretches of a layer without a product with a weight, which cost most to repeat: so
                norms, activation functions, attention's core
    full        whole layers
    alternate   whole layers, but for attention's core and every second product with a weight: what
                torchtitan's SelectiveAC saves (pytorch/torchtitan@b5bcd76c66,
                torchtitan/distributed/activation_checkpoint.py)
    modules     stretches of the named modules, as in "core_attn,mlp"

A search tries the first three, and for a target what that has. Modules have the names of
Megatron-Core (NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_config.py,
recompute_modules). A module is found by the path of PyTorch's modules in the names of its
operators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError, unknown
from autopar.ir import Graph, Operator, Role
from autopar.sharding.rules import RULES, preamble
from autopar.sharding.rules.experts import EXPERTS

from .folding import Run, find_runs

RECOMPUTES = ("none", "selective", "full")
ALTERNATE = "alternate"
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Megatron's `moe_act` is missing: calls inside an expert are one operator with its products."""

_ATTENTION = re.compile(r"attn|attention")
_NORM = re.compile(r"norm|^ln(_|$)")
_FEED_FORWARD = re.compile(r"^(mlp|ffn|feed_?forward|block_sparse_moe|moe)$")
_LATENT = re.compile(r"^(q_a_layernorm|q_b_proj|kv_a_layernorm|kv_b_proj)$")
_SHARED = re.compile(r"^shared_expert")


def read_recompute(text: str) -> tuple[str, ...]:
    """A mode, or the names of modules; raises `UsageError` for an unknown one.

    >>> read_recompute("core_attn,mlp")
    ('core_attn', 'mlp')
    """
    if text in (*RECOMPUTES, ALTERNATE):
        return (text,)
    names = tuple(text.split(","))
    for name in names:
        if name not in MODULES:
            raise UsageError(unknown("recompute", name, (*RECOMPUTES, ALTERNATE, *MODULES)))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Operators of one layer that are recomputed together, by name.

    `key`: the same for the corresponding stretches of equal layers.
    """

    key: tuple[int, int]
    names: tuple[str, ...]


def stretches(graph: Graph, runs: Sequence[Run], recompute: str) -> Iterator[Stretch]:
    """The stretches of every layer of the runs that a mode, or modules, recompute.

    Raises `UsageError` if the layers have no operator of a named module.
    """
    if recompute == "none":
        return
    cold = preamble(graph)
    wanted = read_recompute(recompute)
    # A module may be in some layers only, as experts behind dense ones.
    missing = set(wanted) - {*RECOMPUTES, ALTERNATE}
    for number, run in enumerate(runs):
        for layer in run.segments():
            operators = [graph.operators[index] for index in layer]
            repeated = [False] * len(operators)
            for name in wanted:
                chosen = _CHOICES[name](graph, operators)
                repeated = [one or other for one, other in zip(repeated, chosen, strict=True)]
                missing -= {name} if any(chosen) else set()
            yield from _stretches(number, operators, repeated, cold)
    if missing:
        raise UsageError(f"the model's layers have no {' and no '.join(sorted(missing))}")


def modules_of(graph: Graph, names: Sequence[str]) -> tuple[str, ...]:
    """The named modules that the layers of a model have."""
    runs = find_runs(graph)
    return tuple(
        name
        for name in names
        if any(
            any(_CHOICES[name](graph, [graph.operators[index] for index in next(run.segments())]))
            for run in runs
        )
    )


def _stretches(
    run: int, operators: Sequence[Operator], repeated: Sequence[bool], cold: frozenset[str]
) -> Iterator[Stretch]:
    names: list[str] = []
    for place, (operator, twice) in enumerate(zip(operators, repeated, strict=True)):
        if operator.name in cold:
            continue
        if twice:
            names.append(operator.name)
        elif names:
            yield Stretch(key=(run, place), names=tuple(names))
            names = []
    if names:
        yield Stretch(key=(run, len(operators)), names=tuple(names))


# --- the operators of a layer that each name means ---

Choice = Callable[[Graph, Sequence[Operator]], list[bool]]


def _all(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    return [True] * len(operators)


def _between_weights(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    return [not _multiplies(graph, operator, weights=True) for operator in operators]


def _alternate(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """All but products of values, layers of experts, and the first, third, ... other product."""
    repeated = []
    products = 0
    for operator in operators:
        weighs = operator.kind != EXPERTS and _multiplies(graph, operator, weights=True)
        products += weighs
        others = operator.kind == EXPERTS or _multiplies(graph, operator, weights=False)
        repeated.append(not others and not (weighs and products % 2))
    return repeated


def _core(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """Operators from the first to the last product of two values in attention."""
    inside = [bool(path) and bool(_ATTENTION.search(path[-1])) for path in map(_path, operators)]
    # Views, masks and softmax between the products belong to the core, too.
    products = [
        place
        for place, operator in enumerate(operators)
        if inside[place] and _multiplies(graph, operator, weights=False)
    ]
    if not products:
        return [False] * len(operators)
    return [inner and products[0] <= place <= products[-1] for place, inner in enumerate(inside)]


def _norms(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """The norms of a layer, without those inside attention."""
    return [
        bool(path) and bool(_NORM.search(path[-1])) and not any(map(_ATTENTION.search, path[:-1]))
        for path in map(_path, operators)
    ]


def _latent(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """The projections out of the latent dims of attention, up to its core."""
    paths = [_path(operator) for operator in operators]
    up = [place for place, path in enumerate(paths) if path and _LATENT.match(path[-1])]
    core = _core(graph, operators)
    if not up or not any(core):
        return [False] * len(operators)
    return [
        place in up
        or (up[0] < place < core.index(True) and bool(path) and bool(_ATTENTION.search(path[-1])))
        for place, path in enumerate(paths)
    ]


def _feed_forward(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    return [any(map(_FEED_FORWARD.match, _path(operator))) for operator in operators]


def _dense(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """The feed-forward part of a layer without experts."""
    inside = _feed_forward(graph, operators)
    return [False] * len(operators) if _has_experts(operators) else inside


def _moe(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """The feed-forward part of a layer of experts."""
    inside = _feed_forward(graph, operators)
    return inside if _has_experts(operators) else [False] * len(operators)


def _shared(graph: Graph, operators: Sequence[Operator]) -> list[bool]:
    """The experts of every token."""
    return [any(map(_SHARED.match, _path(operator))) for operator in operators]


_CHOICES: dict[str, Choice] = {
    "selective": _between_weights,
    "full": _all,
    ALTERNATE: _alternate,
    "core_attn": _core,
    "layernorm": _norms,
    "mla_up_proj": _latent,
    "mlp": _dense,
    "moe": _moe,
    "shared_experts": _shared,
}


def _path(operator: Operator) -> list[str]:
    """The modules around an operator, outermost first."""
    path, _, _ = operator.name.rpartition("/" if "/" in operator.name else ".")
    return re.split(r"[./]", path) if path else []


def _has_experts(operators: Sequence[Operator]) -> bool:
    return any(operator.kind == EXPERTS for operator in operators)


def _multiplies(graph: Graph, operator: Operator, *, weights: bool) -> bool:
    """Whether an operator is a product, with a weight matrix or of values alone."""
    if operator.kind == EXPERTS:
        return weights
    held = any(
        graph.tensors[name].role is Role.PARAMETER and len(graph.tensors[name].shape) > 1
        for name in operator.inputs
    )
    return bool(RULES[operator.kind].products) and held == weights
