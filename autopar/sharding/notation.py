"""The factor notation of sharding rules: `* k, n k, +n -> * n | k: sum`, parsed and bound to
shapes.

    rule    = inputs "->" outputs ["|" clause {";" clause}]
    tensor  = ["+"] {dim}            "+": an addend, given once where the output is a partial sum
    dim     = term | "(" {term} ")" | "1"
    term    = ["!"] name ["=" size] | size      "!": must stay whole; a bare size is an outer part
            that is never split
    "*"     = any number of leading dims, aligned on the right between tensors
    clause  = name {"," name} ":" reduction | name {"+" name} {"," ...} ":" special
              "y + x: halo": factor y is split together with its partner x, which is a loop over
              other elements

A dim of size 1 that carries a larger factor is a broadcast dim: it does not hold the factor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.errors import RuleError

from .layout import REDUCTIONS

REDUCERS = (*REDUCTIONS, "mean")
SPECIALS = ("masked",)
ONCE = "once"
"""The word of rows that go once to every place that wants them, axis by axis."""
TRAVELS = frozenset({"dispatch", ONCE})
"""Words of splits in which rows travel between ranks."""
COMMUNICATION = (
    *("halo", "ring", "vocabulary", "statistics", "prefix", "normalize"),
    *sorted(TRAVELS),
)

MEANINGS = (*REDUCERS, *SPECIALS, *COMMUNICATION)

_TERM = re.compile(r"(!?)([A-Za-z_]\w*)(?:=(\d+))?|(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A loop of an operator.

    `reduction`: the reduction that a split of the factor leaves behind (a partial sum, ...).
    `special`: the local form that a rank runs for such a split. `communications`: the words of
    splits that communicate inside the operator, a choice each, with the `partners` (indices of
    factors) that are split alongside. A factor with one offers the plain split only if `special`
    names a local form for it.
    """

    name: str
    size: int
    whole: bool = False
    reduction: str | None = None
    special: str | None = None
    communications: tuple[str, ...] = ()
    partners: tuple[int, ...] = ()


Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule bound to sizes.

    Each dim of a tensor is a tuple of factor indices, outermost first (empty: broadcast).
    """

    text: str
    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    addends: frozenset[int]

    def size_of(self, names: Sequence[str]) -> int:
        """The product of the sizes of the factors `names`."""
        return math.prod(factor.size for factor in self.factors if factor.name in names)

    def splittable(self) -> frozenset[int]:
        """Factors that some option splits, alone or as a partner."""
        alone = [i for i, factor in enumerate(self.factors) if not factor.whole]
        return frozenset(alone) | {partner for i in alone for partner in self.factors[i].partners}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A parsed rule: dims are tuples of term names.

    The tuple `("*",)` is the `*` of the text.
    """

    text: str
    inputs: tuple[tuple[tuple[str, ...], ...], ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]
    addends: frozenset[int]
    whole: frozenset[str]
    clauses: tuple[tuple[tuple[str, ...], str], ...]
    sizes: tuple[tuple[str, int], ...]


@cache
def parse_rule(text: str) -> Pattern:
    """Parse a rule.

    >>> parse_rule("* !d -> * !d").whole
    frozenset({'d'})
    """
    body, _, tail = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'")
    whole: set[str] = set()
    known: dict[str, int] = {}
    addends = frozenset(i for i, part in enumerate(left.split(",")) if part.strip().startswith("+"))
    inputs = tuple(_parse_tensor(part, text, whole, known) for part in left.split(","))
    outputs = tuple(_parse_tensor(part, text, whole, known) for part in right.split(","))
    clauses = tuple(_parse_clauses(tail, text))
    sizes = tuple(sorted(known.items()))
    return Pattern(
        text=text,
        inputs=inputs,
        outputs=outputs,
        addends=addends,
        whole=frozenset(whole),
        clauses=clauses,
        sizes=sizes,
    )


def _parse_tensor(
    part: str, text: str, whole: set[str], known: dict[str, int]
) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in re.findall(r"[()*]|[^\s()*]+", part.strip().removeprefix("+")):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif token == "*" and group is None:
            dims.append(("*",))
        elif match := _TERM.fullmatch(token):
            # A bare size is named by its digits, so equal ones in a rule are one term.
            name = match[2] or match[4]
            if match[3]:
                known[name] = int(match[3])
            if match[1]:
                whole.add(name)
            # `1` is a dim without a factor.
            if group is None:
                dims.append(() if name == "1" else (name,))
            else:
                group.append(name)
        else:
            raise RuleError(f"rule {text!r}: cannot read {token!r}")
    if group is not None or dims.count(("*",)) > 1:
        raise RuleError(f"rule {text!r}: unbalanced parentheses or two '*' in {part.strip()!r}")
    return tuple(dims)


def _parse_clauses(tail: str, text: str) -> list[tuple[tuple[str, ...], str]]:
    """Each clause as (factor and its partners, meaning)."""
    clauses: list[tuple[tuple[str, ...], str]] = []
    for clause in filter(None, (part.strip() for part in tail.split(";"))):
        names, colon, meaning = (part.strip() for part in clause.partition(":"))
        if not colon or meaning not in MEANINGS:
            raise RuleError(
                f"rule {text!r}: clause {clause!r} must end in one of {', '.join(MEANINGS)}"
            )
        clauses += [
            (tuple(part.strip() for part in name.split("+")), meaning) for name in names.split(",")
        ]
    return clauses


def bind(
    pattern: Pattern, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Rule:
    """Give every factor its size from the shapes.

    Trailing inputs of a rule may be absent from the call, as a bias may.
    """
    if len(inputs) > len(pattern.inputs) or len(outputs) > len(pattern.outputs):
        raise RuleError(
            f"rule {pattern.text!r} has {len(pattern.inputs)} inputs, the operator {len(inputs)}"
        )
    shapes = [*inputs, *outputs]
    tensors = [*pattern.inputs[: len(inputs)], *pattern.outputs[: len(outputs)]]
    # The most dims that a `*` stands for. The others align with the last of these, as broadcasting
    # does.
    depth = max(
        (len(s) - len(t) + 1 for s, t in zip(shapes, tensors, strict=True) if ("*",) in t),
        default=0,
    )
    spelled = [
        _expand_star(t, len(s), depth, pattern.text) for t, s in zip(tensors, shapes, strict=True)
    ]
    sizes = _solve_sizes(spelled, shapes, pattern)
    factors = _factors(pattern, sizes)
    position = {factor.name: i for i, factor in enumerate(factors)}
    dims = [
        tuple(
            ()
            if dim == () or (size == 1 and math.prod(sizes[n] for n in dim) > 1)
            else tuple(position[n] for n in dim)
            for dim, size in zip(tensor, shape, strict=True)
        )
        for tensor, shape in zip(spelled, shapes, strict=True)
    ]
    return Rule(
        text=pattern.text,
        factors=tuple(factors),
        inputs=tuple(dims[: len(inputs)]),
        outputs=tuple(dims[len(inputs) :]),
        addends=frozenset(i for i in pattern.addends if i < len(inputs)),
    )


def _factors(pattern: Pattern, sizes: Mapping[str, int]) -> list[Factor]:
    """The factors with these sizes, the written ones first, each with what its clause says."""
    names = [name for name in sizes if not name.isdigit()]
    literals = [name for name in sizes if name.isdigit()]
    factors = [Factor(name=n, size=sizes[n], whole=n in pattern.whole) for n in names]
    factors += [Factor(name=n, size=sizes[n], whole=True) for n in literals]
    position = {factor.name: i for i, factor in enumerate(factors)}
    for (name, *others), meaning in pattern.clauses:
        # A factor may have left with an optional input; its clause then says nothing.
        if name in position:
            old = factors[position[name]]
            partners = tuple(position[other] for other in others)
            if meaning in REDUCERS:
                factors[position[name]] = replace(old, reduction=meaning)
            elif meaning in SPECIALS:
                factors[position[name]] = replace(old, special=meaning)
            else:
                words = (*old.communications, meaning)
                factors[position[name]] = replace(old, communications=words, partners=partners)
    return factors


def local_elements(dims: Dims, local: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elements of a tensor's shard: array [strategies], from the local factor sizes [strategies,
    factors].
    """
    out = np.ones(len(local))
    for dim in dims:
        for factor in dim:
            out = out * local[:, factor]
    return out


def _expand_star(
    tensor: tuple[tuple[str, ...], ...], rank: int, depth: int, text: str
) -> tuple[tuple[str, ...], ...]:
    """Replace `*` by `d0 d1 ...`, aligned on the right with the tensor that has the most leading
    dims.
    """
    if ("*",) in tensor:
        at = tensor.index(("*",))
        count = rank - len(tensor) + 1
        tensor = (
            *tensor[:at],
            *((f"d{i}",) for i in range(depth - count, depth)),
            *tensor[at + 1 :],
        )
    if len(tensor) != rank:
        raise RuleError(
            f"rule {text!r}: a tensor of {len(tensor)} dims does not match one of rank {rank}"
        )
    return tensor


def _solve_sizes(
    tensors: Sequence[Sequence[tuple[str, ...]]], shapes: Sequence[Sequence[int]], pattern: Pattern
) -> dict[str, int]:
    """Sizes of all terms: first lone dims, then each compound's one unknown.

    A size above 1 beats a broadcast 1.
    """
    text = pattern.text
    sizes: dict[str, int] = {}
    given = dict(pattern.sizes)
    pairs = [
        (dim, size)
        for tensor, shape in zip(tensors, shapes, strict=True)
        for dim, size in zip(tensor, shape, strict=True)
    ]
    for dim, size in pairs:
        for name in dim:
            if name.isdigit() or name in given:
                sizes[name] = given.get(name) or int(name)
        if len(dim) == 1 and not dim[0].isdigit():
            # A 1 may be broadcast, and does not contradict another size.
            if sizes.get(dim[0], 1) not in (1, size) and size != 1:
                raise RuleError(
                    f"rule {text!r}: factor {dim[0]!r} is {sizes[dim[0]]} in one tensor and {size} "
                    "in another"
                )
            sizes[dim[0]] = max(size, sizes.get(dim[0], 1)) if size else 0
    # Twice: a compound that is solved may be what another one waits for.
    for dim, size in [*pairs, *pairs]:
        missing = [name for name in dim if name not in sizes]
        known = math.prod(sizes[name] for name in dim if name in sizes)
        # Two unknowns in one dim wait until another tensor gives one of them.
        if len(missing) == 1 and known and size % known == 0:
            sizes[missing[0]] = size // known
    for dim, size in pairs:
        _check_size(dim, size, sizes, text)
    return sizes


def _check_size(dim: tuple[str, ...], size: int, sizes: Mapping[str, int], text: str) -> None:
    """Raise `RuleError` unless the terms of a dim are known and multiply to its size."""
    if any(name not in sizes for name in dim):
        raise RuleError(
            f"rule {text!r}: the sizes of {' '.join(dim)} are not determined by the shapes"
        )
    # A compound of size 1 is broadcast as a whole.
    if dim and size not in (1, math.prod(sizes[name] for name in dim)):
        raise RuleError(f"rule {text!r}: ({' '.join(dim)}) does not multiply to {size}")
