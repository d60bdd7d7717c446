"""What `autopar explain` prints: from the plan file alone, or, with the model at hand, every layout, collective, byte and second."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autopar.costmodel import Cluster

from ..errors import UsageError
from ..ir import Graph
from ..plan import Plan
from ..sharding.analysis import analyse
from .account import Account, OperatorAccount, account_of
from .compare import Alternative, alternatives
from .explain import bare_lines, bare_table, find_operators, operator_json, operator_lines, storage_table
from .grouping import groups_of
from .planned import group_json
from .tables import Table, operators_table, summary_lines
from .units import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan, the operators asked for (None: all), and what is known of them."""

    plan: Plan
    names: tuple[str, ...] | None
    account: Account | None = None
    others: tuple[Alternative, ...] = ()

    @classmethod
    def of_file(cls, plan: Plan, wanted: str | None) -> Explained:
        """What the plan file tells."""
        return cls(plan=plan, names=tuple(find_operators(list(plan.operators), wanted)) if wanted else None)

    @classmethod
    def of_model(cls, plan: Plan, graph: Graph, cluster: Cluster, wanted: str | None, *, rivals: bool) -> Explained:
        """What the plan does to its model, priced on `cluster`; with `rivals`, what other strategies of the operator would cost."""
        found = cls.of_file(plan, wanted)
        analysis = analyse(graph, train=plan.model.mode == "train")
        account = account_of(plan, analysis, cluster)
        if not rivals:
            return dataclasses.replace(found, account=account)
        if found.names is None or len(found.names) != 1:
            raise UsageError(f"--alternatives needs one operator; {wanted!r} names {len(found.names or ())}")
        return dataclasses.replace(found, account=account, others=tuple(alternatives(plan, analysis, cluster, found.names[0])))

    @property
    def chosen(self) -> list[OperatorAccount]:
        """The accounts of the operators asked for."""
        return [a for a in (self.account.operators if self.account else ()) if self.names is None or a.operator.name in self.names]

    def parts(self) -> list[str | Table]:
        """Sentences and tables, in the order of printing."""
        plan, account = self.plan, self.account
        if self.names is None:
            lines: list[str | Table] = [*summary_lines(plan, f"cluster {plan.cluster}", account)]
            lines.append(operators_table(groups_of(account), account) if account else bare_table(plan, plan.operators))
            return [*lines, storage_table(plan), *([] if account else [_HINT])]
        if account is None:
            return [*(line for name in self.names for line in bare_lines(plan, name)), _HINT]
        found: list[str | Table] = [line for chosen in self.chosen for line in operator_lines(chosen, account)]
        return [*found, self._others()] if self.others else found

    def _others(self) -> Table:
        base = self.plan.predicted.step
        rows = [("as planned", "", "", seconds_text(base), "")]
        for other in self.others:
            step, more = ("no plan fits", "") if other.step is None else (seconds_text(other.step), f"{(other.step / base - 1):+.2%}")
            rows.append((other.axis, other.option, other.words, step, more))
        columns = ("axis", "option", "means", ">step", ">change")
        return Table(title="The best plan if this operator were split otherwise on one axis", columns=columns, rows=tuple(rows))

    def json(self) -> dict[str, Any]:
        """The same as one object: seconds and bytes."""
        plan, account = self.plan, self.account
        out: dict[str, Any] = {"cluster": plan.cluster, "mesh": {axis.name: axis.size for axis in plan.mesh}, "model": plan.model.name}
        if self.names is None:
            out |= {"predicted": plan.predicted.model_dump(mode="json"), "provenance": plan.provenance.model_dump(mode="json")}
            out["groups"] = [group_json(group) for group in groups_of(account)] if account else None
        names = plan.operators if self.names is None else self.names
        out["operators"] = [operator_json(chosen, account) for chosen in self.chosen] if account else [self._bare(name) for name in names]
        if self.others:
            out["alternatives"] = [dataclasses.asdict(other) for other in self.others]
        return out

    def _bare(self, name: str) -> dict[str, Any]:
        """An operator as the plan file tells it."""
        held = self.plan.operators[name]
        axes = [axis.name for axis in self.plan.mesh]
        return {"name": name, "kind": held.kind, "strategy": dict(zip(axes, held.strategy, strict=True))}


_HINT = "\nwith --model MODEL: the rule, local shapes, and what belongs to which operator as well"
