"""The search space of a model without its mesh: rules, options, storage, kinds of tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from autopar.ir import Graph, Operator, Role

from .candidates import options_of
from .classes import FactorClass, factor_classes
from .equal_parts import keep_useful_factors, split_variants
from .layout import B, Placement, R, S
from .matrices import MUON, hidden_matrices
from .notation import TRAVELS, Rule
from .regions import Region, regions_of
from .rules import RULES, Call, check_supported, preamble, rule_of, tensors_with_gradient
from .strategies import Option


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """One operator's rule and options; operators of equal signature share one offer.

    Offers are compared as objects, so that they are cheap keys.
    """

    call: Call
    rule: Rule
    options: tuple[Option, ...]

    def way_of_rows(self, option: Option) -> str:
        """The word for how rows come to the ranks of experts; "" where no experts are split."""
        if option.factor < 0 or not RULES[self.call.operator.kind].products:
            return ""
        words = {option.communication, self.rule.factors[option.factor].special}
        return next((word for word in (*sorted(TRAVELS), "masked") if word in words), "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """A graph and all that is known about its sharding before a mesh is chosen.

    Compared as an object, so that it is a cheap key.

    `classes`: the class of every factor of every operator (rows, hidden dim, inner dim, experts).
    `cold`: operators that depend on no parameter and are computed whole on every device. `offers`:
    rule and options of the other operators, the warm ones. `kinds`: the placements that a tensor
    may take on one axis. `readers`: the (operator index, input index) pairs of every tensor that
    warm operators read; an output of the model is read as (-1, output index). `ends`: outputs from
    which gradients come back beside the loss's. `matrices`: parameters that are matrices of hidden
    layers. `regions`: the warm operators, those together that are decided as one.
    """

    graph: Graph
    train: bool
    gradients: frozenset[str]
    cold: frozenset[str]
    offers: Mapping[str, Offer]
    classes: Mapping[str, tuple[FactorClass, ...]]
    kinds: Mapping[str, tuple[Placement, ...]]
    readers: Mapping[str, tuple[tuple[int, int], ...]]
    outputs: tuple[str, ...]
    ends: tuple[str, ...] = ()
    matrices: frozenset[str] = frozenset()
    regions: tuple[Region, ...] = ()

    def updated_whole(self, optimizer: str) -> frozenset[str]:
        """The parameters that an optimizer updates as whole matrices."""
        return self.matrices if optimizer == MUON else frozenset()

    @property
    def warm(self) -> tuple[Operator, ...]:
        """Operators that the search decides on, in order."""
        return tuple(op for op in self.graph.operators if op.name not in self.cold)

    def as_offered(self, op: Operator, names: Container[str]) -> frozenset[str]:
        """Translate the tensors of `op` in `names` to the names in its offer, which may come from
        an equal operator.
        """
        theirs = self.offers[op.name].call.operator
        pairs = zip((*op.inputs, *op.outputs), (*theirs.inputs, *theirs.outputs), strict=True)
        return frozenset(other for name, other in pairs if name in names)


def analyse(graph: Graph, *, train: bool, ends: tuple[str, ...] = ()) -> Analysis:
    """Look up every operator's rule (all unknown ones are named at once) and list its options.

    `ends`: outputs from which gradients come back beside the loss's.
    """
    check_supported(graph)
    gradients = tensors_with_gradient(graph, train=train, ends=ends)
    cold = preamble(graph)
    warm = [op for op in graph.operators if op.name not in cold]
    bound = _rules(graph, warm)
    # Classes are taken from all factors. Useless ones are then marked whole, and equal parts are
    # sought only for what is left to split.
    classes = factor_classes(graph, bound)
    rules = keep_useful_factors(graph, bound, classes)
    factors, parts = split_variants(graph, rules)
    offers = _offers(graph, warm, rules, gradients, factors)
    # The loss and the new values of changed constants leave the step, too; one tensor may be both
    # these and an output.
    outputs = tuple(
        dict.fromkeys(
            (
                *graph.outputs,
                *((graph.loss,) if graph.loss and train else ()),
                *graph.updates.values(),
            )
        )
    )
    return Analysis(
        graph=graph,
        train=train,
        gradients=gradients,
        cold=cold,
        offers=offers,
        classes=classes,
        outputs=outputs,
        ends=ends,
        kinds=_kinds(graph, warm, offers, parts, gradients, outputs),
        readers=_readers(graph, cold, outputs),
        matrices=hidden_matrices(graph) if train else frozenset(),
        regions=regions_of(graph, warm, {name: offer.options for name, offer in offers.items()}),
    )


def _rules(graph: Graph, warm: list[Operator]) -> dict[str, Rule]:
    known: dict[str, Rule] = {}
    rules = {}
    for op in warm:
        # Layers repeat the same calls: each distinct one has its rule bound once.
        key = graph.operator_fingerprint(op)
        if key not in known:
            known[key] = rule_of(Call.of(graph, op))
        rules[op.name] = known[key]
    return rules


def _offers(
    graph: Graph,
    warm: list[Operator],
    rules: Mapping[str, Rule],
    gradients: frozenset[str],
    factors: Mapping[str, Mapping[int, tuple[int, ...]]],
) -> dict[str, Offer]:
    known: dict[object, Offer] = {}
    offers = {}
    for op in warm:
        # Equal operators may still differ in what the graph around them decides: gradients (without
        # one, B becomes R), factors kept whole, and the parts to split within.
        mask = tuple(name in gradients for name in (*op.inputs, *op.outputs))
        key = (
            graph.operator_fingerprint(op),
            mask,
            tuple(sorted(factors[op.name].items())),
            rules[op.name].factors,
        )
        if key not in known:
            call = Call.of(graph, op)
            known[key] = Offer(
                call=call,
                rule=rules[op.name],
                options=options_of(call, rules[op.name], gradients, factors[op.name]),
            )
        offers[op.name] = known[key]
    return offers


def _kinds(
    graph: Graph,
    warm: list[Operator],
    offers: Mapping[str, Offer],
    parts: Mapping[str, Mapping[int, tuple[int, ...]]],
    gradients: frozenset[str],
    outputs: tuple[str, ...],
) -> dict[str, tuple[Placement, ...]]:
    taken: dict[str, set[Placement]] = {}
    for op in warm:
        for option in offers[op.name].options:
            for name, placement in zip(
                (*op.inputs, *op.outputs), (*option.inputs, *option.outputs), strict=True
            ):
                taken.setdefault(name, set()).add(placement)
    # A parameter may be stored, and an output given, split along a dim that no operator splits:
    # ZeRO stores parameters so.
    for tensor in graph.tensors.values():
        if tensor.role is Role.PARAMETER or tensor.name in outputs:
            splits = {
                S(dim, q)
                for dim in range(len(tensor.shape))
                if tensor.shape[dim] > 1
                for q in parts.get(tensor.name, {}).get(dim, (1,))
            }
            taken.setdefault(tensor.name, set()).update(splits)
    # Layouts are numbered by this order. It must not be a set's, which differs from run to run as
    # hashes of strings do.
    order = {R: 0, B: 1}
    kinds = {}
    for name, placements in taken.items():
        # Parameters may be stored R, and chains pass through R and B, whether an operator asks for
        # them or not.
        always = {R, B} if name in gradients else {R}
        kinds[name] = tuple(
            sorted(
                placements | always, key=lambda p: (order.get(p, 2), p.kind.value, p.dim, p.parts)
            )
        )
    return kinds


def _readers(
    graph: Graph, cold: frozenset[str], outputs: tuple[str, ...]
) -> dict[str, tuple[tuple[int, int], ...]]:
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, op in enumerate(graph.operators):
        if op.name not in cold:
            for position, name in enumerate(op.inputs):
                readers.setdefault(name, []).append((index, position))
    for position, name in enumerate(outputs):
        readers.setdefault(name, []).append((-1, position))
    return {name: tuple(pairs) for name, pairs in readers.items()}
