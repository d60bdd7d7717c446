"""The table of sharding rules: operator kind → rule text, or a function of the call that writes the
text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from autopar.errors import RuleError, UnsupportedOperators
from autopar.ir import Graph, Operator, Ref, Role, Tensor, Value
from autopar.sharding.notation import Rule, bind, parse_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator with its tensors, as a rule sees it."""

    operator: Operator
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, graph: Graph, operator: Operator) -> Call:
        """The call that `operator` makes in `graph`."""
        return cls(
            operator=operator,
            inputs=tuple(graph.tensors[name] for name in operator.inputs),
            outputs=tuple(graph.tensors[name] for name in operator.outputs),
        )

    def get(self, *names: str, default: Value = None) -> Value:
        """The first of the attributes `names` that the operator has."""
        for name in names:
            if name in self.operator.attributes:
                return self.operator.attributes[name]
        return default

    def integer(self, *names: str, default: int = 0) -> int:
        """An integer attribute."""
        value = self.get(*names, default=default)
        if not isinstance(value, int):
            raise RuleError(
                f"{self.operator.name!r}: attribute {names[0]!r} is {value!r}, not an integer"
            )
        return value

    def dims(self, rank: int, *names: str) -> tuple[int, ...]:
        """Dims named by an integer or tuple attribute, counted from the front; all dims where it is
        absent or empty.
        """
        value = self.get(*names)
        if value is None or value == ():
            return tuple(range(rank))
        values = value if isinstance(value, tuple) else (value,)
        return tuple(sorted(int(v) % max(rank, 1) for v in values if isinstance(v, int)))

    def position(self, name: str) -> int | None:
        """Index among the inputs of the tensor argument `name`, or None where it is absent."""
        value = self.operator.attributes.get(name)
        return value.index if isinstance(value, Ref) else None


RuleText = str | Callable[[Call], str]
Linear = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the table.

    `linear`: sets of inputs in which the operator is jointly linear, so that partial values pass
    through it; `linear_of` gives them where they depend on the call. `affine`: whether it adds up
    all its inputs and numbers: partial values then pass through it over time. `products`: the
    products of factor sizes that count multiply-adds; empty for memory-bound operators. A product
    is given by the letters of the factors that it leaves out: `""` takes all factors. `"/e"` means
    that each element meets one of the e, so a share of the elements does a share of the work.
    `differentiable`: whether the output can carry a gradient. `saves`: the tensors that autograd
    keeps for the backward pass: "inputs", "output" or "" for none; `saved` is more exact for many
    kinds. `view`: whether the output is a view of the input, which costs nothing. `covers`: the
    calls that have this rule (None: all). `stand_in`: the kind has no rule; the row serves graphs
    whose `replicated` names the kind.
    """

    rule: RuleText
    linear: Linear = ()
    affine: bool = False
    products: tuple[str, ...] = ()
    differentiable: bool = True
    saves: str = "inputs"
    view: bool = False
    covers: Callable[[Call], bool] | None = None
    stand_in: bool = False
    linear_of: Callable[[Call], Linear] | None = None

    def linear_in(self, call: Call) -> Linear:
        """The sets of inputs in which a call is jointly linear."""
        return self.linear if self.linear_of is None else self.linear_of(call)


RULES: dict[str, Entry] = {}


def register(
    kinds: str | Iterable[str],
    rule: RuleText,
    *,
    linear: Linear = (),
    linear_of: Callable[[Call], Linear] | None = None,
    affine: bool = False,
    products: tuple[str, ...] = (),
    differentiable: bool = True,
    saves: str = "inputs",
    view: bool = False,
) -> None:
    """Give the operator `kinds` (a name, or names separated by spaces) a rule; a kind can be
    registered only once.
    """
    entry = Entry(
        rule=rule,
        linear=linear,
        linear_of=linear_of,
        affine=affine,
        products=products,
        differentiable=differentiable,
        saves="" if view else saves,
        view=view,
    )
    if isinstance(rule, str):
        # A rule that cannot be read fails where it is written, not at the first model with the
        # operator.
        parse_rule(rule)
    for kind in kinds.split() if isinstance(kinds, str) else kinds:
        if kind in RULES and not RULES[kind].stand_in:
            raise RuleError(f"operator {kind!r} already has a sharding rule")
        RULES[kind] = entry


def rule_of(call: Call) -> Rule:
    """The rule of a call, bound to its shapes."""
    entry = RULES.get(call.operator.kind)
    if entry is None:
        raise UnsupportedOperators({call.operator.kind: 1}, known=RULES)
    text = entry.rule if isinstance(entry.rule, str) else entry.rule(call)
    try:
        return bind(
            parse_rule(text), [t.shape for t in call.inputs], [t.shape for t in call.outputs]
        )
    except RuleError as error:
        raise RuleError(
            f"operator {call.operator.name!r} ({call.operator.kind}): {error}"
        ) from error


LARGE = 64 * 2**20
"""Size in bytes up to which a value that depends on no parameter is computed whole on every device.

A device makes such a value in microseconds, and tables that all layers share (positions, rotations,
a causal mask of 8,192 tokens) stay out of the search. Larger values are decided by the search.
"""


def is_product(kind: str) -> bool:
    """Whether operators of a kind multiply."""
    return kind in RULES and bool(RULES[kind].products)


def products_of(kind: str, rule: Rule) -> float:
    """The multiply-adds of an operator's products by its rule's factors, 0 of one without any."""
    sizes = {factor.name: factor.size for factor in rule.factors}
    # Each product names the factors that it leaves out.
    return float(
        sum(
            math.prod(size for name, size in sizes.items() if not name.startswith(tuple(left)))
            for left in RULES[kind].products
        )
        if kind in RULES
        else 0
    )


def preamble(graph: Graph) -> frozenset[str]:
    """Names of the operators that depend on no parameter and give small values: masks, positions,
    tables.

    Every device computes them whole, without rule or communication: any consumer slices for free.
    An operator that gives more than `LARGE` bytes is an ordinary operator if its rule splits
    something, and so are the operators behind it. Two kinds of operators stay in the preamble all
    the same, with all before them: those without a rule, and those that give a single number (a
    count of labels, which micro-batches need of the whole batch).
    """
    free = without_parameters(graph)
    spread = [
        op
        for op in free
        if _is_large(graph, op)
        and (rule := known_rule(graph, op)) is not None
        and rule.splittable()
    ]
    if not spread:
        return frozenset(op.name for op in free)
    behind = _behind(free, spread)
    staying: set[str] = set()
    needed: set[str] = set()
    # From the back, so that what an operator that stays reads stays as well.
    for operator in reversed(free):
        if not needed.isdisjoint(operator.outputs) or (
            operator.name in behind and not _may_be_ordinary(graph, operator)
        ):
            staying.add(operator.name)
            needed.update(operator.inputs)
    ordinary = _behind(free, [op for op in spread if op.name not in staying])
    return frozenset(op.name for op in free if op.name not in ordinary)


def without_parameters(graph: Graph) -> list[Operator]:
    """The operators that no parameter leads to, in order."""
    warm = {tensor.name for tensor in graph.parameters}
    free = []
    for operator in graph.operators:
        if any(name in warm for name in operator.inputs):
            warm.update(operator.outputs)
        else:
            free.append(operator)
    return free


def _behind(operators: Iterable[Operator], sources: Iterable[Operator]) -> set[str]:
    """Names of the `sources` and of the operators that they lead to."""
    reached = {op.name for op in sources}
    made: set[str] = set()
    for operator in operators:
        if operator.name in reached or not made.isdisjoint(operator.inputs):
            reached.add(operator.name)
            made.update(operator.outputs)
    return reached


def _is_large(graph: Graph, operator: Operator) -> bool:
    return any(graph.tensors[name].bytes > LARGE for name in operator.outputs)


def _may_be_ordinary(graph: Graph, operator: Operator) -> bool:
    return known_rule(graph, operator) is not None and any(
        graph.tensors[name].size > 1 for name in operator.outputs
    )


def known_rule(graph: Graph, operator: Operator) -> Rule | None:
    """The rule of an operator, None where there is none for this call."""
    if not has_rule(graph, operator):
        return None
    try:
        return rule_of(Call.of(graph, operator))
    except RuleError:
        return None


_REMEDY = (
    "Give a rule (autopar.register_rule, --rules MODULE), have it found by executing the operator "
    "(--discover), "
    "or have every device compute all of it (--replicate-unknown)"
)


def has_rule(graph: Graph, operator: Operator) -> bool:
    """Whether the table holds a rule for this operator."""
    entry = RULES.get(operator.kind)
    if entry is None or operator.kind in graph.replicated:
        return entry is not None
    return not entry.stand_in and (entry.covers is None or entry.covers(Call.of(graph, operator)))


def without_rule(graph: Graph) -> tuple[Operator, ...]:
    """The operators that need a rule and have none."""
    cold = preamble(graph)
    return tuple(op for op in graph.operators if op.name not in cold and not has_rule(graph, op))


def check_supported(graph: Graph) -> None:
    """Raise one error that names every operator kind without a rule, with how often it occurs."""
    missing = Counter(op.kind for op in without_rule(graph))
    if missing:
        raise UnsupportedOperators(
            missing,
            known=(kind for kind, entry in RULES.items() if not entry.stand_in),
            remedy=_REMEDY,
        )


def tensors_with_gradient(
    graph: Graph, *, train: bool, ends: Collection[str] = ()
) -> frozenset[str]:
    """Tensors on a path of differentiable operators from a trainable parameter to the loss, or to
    one of the `ends` (none when not training).
    """
    # A gradient comes back from an end and is of use only on the way to a trained parameter: both
    # directions are walked, and a tensor needs both.
    if not train or graph.loss is None:
        return frozenset()
    smooth = _smooth(graph)
    back = {graph.loss, *ends}
    for operator in reversed(smooth):
        if any(name in back for name in operator.outputs):
            back.update(name for name in operator.inputs if graph.tensors[name].is_float)
    return tensors_of_parameters(graph) & back


def tensors_of_parameters(graph: Graph) -> frozenset[str]:
    """Tensors that differentiable operators make of trainable parameters, with these."""
    ahead = {t.name for t in graph.tensors.values() if t.role is Role.PARAMETER and t.trainable}
    for operator in _smooth(graph):
        if any(name in ahead for name in operator.inputs):
            ahead.update(name for name in operator.outputs if graph.tensors[name].is_float)
    return frozenset(ahead)


def _smooth(graph: Graph) -> list[Operator]:
    return [op for op in graph.operators if op.kind in RULES and RULES[op.kind].differentiable]
