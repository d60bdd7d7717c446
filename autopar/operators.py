"""The user's own operators.

They get rules by hand or by execution, or are planned without a rule.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import DiscoveryError, PlanError, RuleError, UsageError, times, unknown
from .model import LoadedModel
from .plan import Plan
from .sharding.notation import parse_rule
from .sharding.rules import RULES, Entry, without_rule
from .sharding.rules.discovered import DiscoveredRule, add_found, is_open, replicate, signature
from .sharding.rules.registry import Call, RuleText, register

if TYPE_CHECKING:
    from autopar.runtime.discovery import Discovery

SAVES = ("inputs", "output", "")
_KIND = re.compile(r"[\w.]+\.\w+")


def register_rule(
    kinds: Any,
    rule: RuleText | None = None,
    *,
    linear: Iterable[Iterable[int]] = (),
    products: Iterable[str] = (),
    differentiable: bool = True,
    saves: str = "inputs",
    view: bool = False,
    samples: Sequence[Any] = (),
) -> Any:
    """Give operators a sharding rule, from now on in this process.

    `kinds`: `"mylib.my_op.default"` (several separated by spaces; `mylib::my_op` means its default
    overload), a `torch.ops` operator or overload, the result of `torch.library.custom_op`, or a
    sequence of these. `rule`: the notation, or a function of the call that writes it. Without
    `rule` this is a decorator: of the operator if the given text is a rule, else of the function
    that writes the rule. `linear`, `products`, `differentiable`, `saves`, `view`: see
    `autopar.sharding.rules.Entry`. `samples`: calls (a tuple of arguments, or a dict by name). The
    rule is accepted only after a proof by executing them on meshes of 2, 3 and 2 x 2; sizes that
    divide by 12 let every split be tried. Raises `RuleError` if the rule is unreadable or
    contradicts itself or an execution, or if an operator already has a rule.
    """
    columns: dict[str, Any] = {
        "linear": tuple(tuple(members) for members in linear),
        "products": tuple(products),
        "differentiable": differentiable,
        "saves": saves,
        "view": view,
    }
    if rule is None:

        def decorate(target: Any) -> Any:
            text_given = isinstance(kinds, str) and "->" in kinds
            register_rule(
                *((target, kinds) if text_given else (kinds, target)), samples=samples, **columns
            )
            return target

        return decorate
    names = kinds_of(kinds)
    for kind in names:
        if kind in RULES and not RULES[kind].stand_in:
            raise RuleError(f"operator {kind!r} already has a sharding rule")
    _check_columns(rule, columns)
    if samples:
        from autopar.runtime.discovery import prove_rule

        for kind in names:
            prove_rule(kind, Entry(rule=rule, **columns), samples)
    register(names, rule, **columns)
    return None


def kinds_of(given: Any) -> tuple[str, ...]:
    """The operator kinds that are meant by names, operators, or sequences of these."""
    if isinstance(given, str):
        return tuple(_kind(name) for name in given.split())
    if hasattr(given, "_opoverload"):  # torch.library.custom_op
        return (str(given._opoverload),)
    if hasattr(given, "overloads") and hasattr(
        given, "_qualified_op_name"
    ):  # an operator, of one or more overloads
        return tuple(f"{given}.{name}" for name in given.overloads())
    if hasattr(given, "_schema"):
        return (str(given),)
    if isinstance(given, Iterable):
        return tuple(kind for item in given for kind in kinds_of(item))
    raise RuleError(
        f"{given!r} is no operator: give 'namespace.name.overload' or an operator of torch.ops"
    )


def _kind(name: str) -> str:
    """A kind as graphs spell it: a namespace, a name and an overload."""
    if "::" in name:
        name = name.replace("::", ".")
        return name if name.count(".") > 1 else f"{name}.default"
    if not _KIND.fullmatch(name):
        raise RuleError(f"{name!r} is no operator kind: write namespace.name.overload")
    return name


def _check_columns(rule: RuleText, columns: Mapping[str, Any]) -> None:
    """Refuse contradictory columns before anything is planned with them."""
    if columns["saves"] not in SAVES:
        raise RuleError(unknown("kind of saved tensors", columns["saves"], map(repr, SAVES)))
    if not isinstance(rule, str):
        if not callable(rule):
            raise RuleError(
                f"a rule is a text or a function of the call, not {type(rule).__name__}"
            )
        return
    pattern = parse_rule(rule)
    known = {
        term for tensor in (*pattern.inputs, *pattern.outputs) for dim in tensor for term in dim
    }
    for names, _ in pattern.clauses:
        for name in names:
            if name not in known and not re.fullmatch(r"d\d+", name):
                raise RuleError(f"rule {rule!r}: " + unknown("factor", name, sorted(known - {"*"})))
    for members in columns["linear"]:
        if not members or any(not 0 <= index < len(pattern.inputs) for index in members):
            raise RuleError(
                f"rule {rule!r} has {len(pattern.inputs)} inputs; linear names {members}"
            )


def import_rules(modules: Iterable[str]) -> None:
    """Import the modules that a user names, for the rules that they register."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--rules {name}: cannot be imported: {error}") from error


def provide_rules(
    model: LoadedModel, *, discover: bool, replicate_unknown: bool
) -> tuple[LoadedModel, tuple[str, ...]]:
    """The model with rules for its unknown operators, and sentences about them.

    With `discover`, rules are found by executing the operators. With `replicate_unknown`, operators
    that are still without a rule are computed whole on every device. Without it, one
    `DiscoveryError` names all whose rules cannot be found.
    """
    notes: list[str] = []
    failures: dict[str, str] = {}
    if discover:
        notes += _discovered(model, failures)
    if failures and not replicate_unknown:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in failures.items())
        raise DiscoveryError(
            f"no rule was found for {len(failures)} operator kind{'s' * (len(failures) > 1)}: "
            f"{reasons}"
        )
    if replicate_unknown:
        counts = Counter(op.kind for op in without_rule(model.graph))
        model = replace(model, graph=replicate(model.graph, counts))
        listed = ", ".join(f"{kind} ({times(counts[kind])})" for kind in sorted(counts))
        notes += [f"without a rule, so computed whole on every device: {listed}"] * bool(counts)
    return model, tuple(notes)


def _discovered(model: LoadedModel, failures: dict[str, str]) -> list[str]:
    """Find rules for a model's unknown operators, one a signature.

    Add the reasons of failures to `failures`.
    """
    calls = {
        signature(call): call
        for call in (Call.of(model.graph, op) for op in without_rule(model.graph))
    }
    if not calls:
        return []
    try:
        from autopar.runtime.discovery import discover_call
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "finding rules executes operators, which needs PyTorch: pip install 'autopar[torch]'"
        ) from error
    notes = []
    for key, call in calls.items():
        try:
            discovery = discover_call(call, model.graph.constants)
        except DiscoveryError as error:
            failures[call.operator.kind] = str(error).removeprefix(f"{call.operator.kind}: ")
            continue
        add_found([found_rule(discovery, key)])
        notes += [
            f"rule found by execution: {discovery.line}",
            *(f"{call.operator.kind}: {note}" for note in discovery.notes),
        ]
    return notes


def found_rule(discovery: Discovery, key: str) -> DiscoveredRule:
    """A discovery as the rule of the calls with one signature."""
    entry = discovery.entry
    assert isinstance(entry.rule, str)
    return DiscoveredRule(
        kind=discovery.kind,
        signature=key,
        rule=entry.rule,
        linear=entry.linear,
        products=entry.products,
        differentiable=entry.differentiable,
        saves=entry.saves,
    )


def bring_rules(model: LoadedModel, plan: Plan) -> LoadedModel:
    """The model with the plan's rules for operators without a rule.

    A plan file may say anything, and the table is for every model of this process, so a rule is
    first proven by executing the operator.
    """
    calls: dict[tuple[str, str], list[Call]] = {}
    for call in (Call.of(model.graph, op) for op in model.graph.operators if plan.rules):
        calls.setdefault((call.operator.kind, signature(call)), []).append(call)
    for given in plan.rules:
        try:
            rule = DiscoveredRule(**given.model_dump())
            held = calls.get((rule.kind, rule.signature), [])
            if held and is_open(rule):
                _prove(rule, held, model, plan)
                add_found([rule])
        except RuleError as error:
            raise PlanError(f"the plan holds a bad rule for {given.kind}: {error}") from error
    replicated = plan.replicated
    load = model.reload

    def reload(module: Any, shapes: Any = None) -> LoadedModel:
        assert load is not None
        other = load(module, shapes)
        return replace(other, graph=replicate(other.graph, replicated))

    graph = replicate(model.graph, replicated)
    return replace(model, graph=graph, reload=None if load is None else reload)


def _prove(rule: DiscoveredRule, calls: Sequence[Call], model: LoadedModel, plan: Plan) -> None:
    """Raise a `PlanError` unless execution confirms the rule on each factor that the plan splits.

    The operator is executed on small shards.
    """
    try:
        from autopar.runtime.discovery import prove_call
        from autopar.runtime.proof import Disproved
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needs = (
            "which is proven by executing the operator before it is used: this needs PyTorch (pip "
            "install 'autopar[torch]')"
        )
        raise PlanError(f"the plan holds a rule for {rule.kind}, {needs}") from error
    remedy = (
        "plan again with --discover, or give a rule of your own (autopar.register_rule, --rules "
        "MODULE)"
    )
    _check_columns(rule.rule, {"saves": rule.saves, "linear": rule.linear})
    try:
        untried = prove_call(rule.entry, calls[0], model.graph.constants)
    except (Disproved, DiscoveryError) as error:
        why = str(error).splitlines()[0]
        raise PlanError(
            f"the plan's rule for {rule.kind}, {rule.rule!r}, is not what the operator computes: "
            f"{why}; {remedy}"
        ) from error
    used = {
        factor
        for call in calls
        if (held := plan.operators.get(call.operator.name))
        for factor in held.strategy
    }
    if missing := sorted(used & untried):
        raise PlanError(
            f"the plan splits {', '.join(missing)} of {rule.kind}, which no execution has proven; "
            f"{remedy}"
        )


def discover(target: str | Callable[..., Any], *inputs: Any, **arguments: Any) -> Discovery:
    """Find an operator's sharding rule by executing it on small shards, and prove it.

    `found.line` registers it.

    `target`: an operator of `torch.ops` or its name, with example inputs in the order of its
    arguments; or `package:function`, which returns (operator or function, example inputs[, keyword
    arguments]), or is the function itself if the module also has `<function>_inputs`. Raises
    `DiscoveryError` if the operator is not a function of its inputs.
    """
    from autopar.runtime.discovery import discover_target

    return discover_target(target, inputs, arguments)
