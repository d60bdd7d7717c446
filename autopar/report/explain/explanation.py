"""The output of `autopar explain`, from the plan file alone or with its model.

The model adds layouts, collectives and prices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autopar.analysis.program.account import Account, OperatorAccount, account_of, has_account
from autopar.analysis.program.equal_layers import groups_of
from autopar.analysis.program.hiding import Hidden, hidden_of
from autopar.analysis.program.stalls import Stalls, stalls_of
from autopar.analysis.program.unequal_layers import unequal_lines
from autopar.analysis.searches.alternatives import Alternative
from autopar.analysis.searches.gap_parts import GapParts, gap_parts
from autopar.analysis.searches.outer_choices import Pinned
from autopar.analysis.searches.sensitivity import Flip
from autopar.costmodel import Cluster
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.plan_checks import require_consistent
from autopar.report.certainty import certainty_json, certainty_lines, kernel_lines
from autopar.report.frameworks import repriced, repriced_lines
from autopar.report.page.difference import difference_json, difference_lines, difference_tables
from autopar.report.plan_output import group_json
from autopar.report.stages import stages_table
from autopar.report.tables import Table, operators_table, summary_lines
from autopar.schemes import Named, scheme_of
from autopar.sharding.analysis import Analysis, analyse

from .answers import alternatives_table, flips_table, pinned_table
from .collectives import collectives_json, collectives_parts
from .gap import gap_json, gap_parts_told
from .operators import (
    bare_lines,
    bare_table,
    find_operators,
    operator_json,
    operator_lines,
    storage_table,
)
from .parameters import parameter_lines, storages_of
from .stalls import stalls_json, stalls_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan, the requested operators (None: all), and the answers about them.

    `parameter`: the requested parameter instead, with its possible `storages`. `others`: other
    strategies of the single operator; `step`: the seconds of the plan. `pinned`: the best plans
    with another pipeline, recompute and so on. `flips`: the changes of the plan under scaled
    figures, from `base`, the plan found without pins. `beside`: another plan to compare with.
    `talk`: whether collectives are requested. `stalls`: what lengthens the step. `gap`: what the
    bound leaves out.
    """

    plan: Plan
    names: tuple[str, ...] | None
    analysis: Analysis | None = None
    named: Named | None = None
    account: Account | None = None
    cluster: Cluster | None = None
    step: float = 0.0
    others: tuple[Alternative, ...] = ()
    pinned: tuple[Pinned, ...] = ()
    flips: tuple[Flip, ...] = ()
    base: str = ""
    parameter: str = ""
    storages: tuple[Alternative, ...] = ()
    beside: Plan | None = None
    talk: bool = False
    stalls: Stalls | None = None
    gap: GapParts | None = None

    @classmethod
    def of_file(cls, plan: Plan, wanted: str | None) -> Explained:
        """The answers from the plan file alone."""
        require_consistent(plan)
        if wanted in plan.parameters and wanted not in plan.operators:
            return cls(plan=plan, names=(), parameter=wanted)
        if not wanted:
            return cls(plan=plan, names=None)
        # A region's name may be that of a module, too, and of more operators then.
        region = tuple(name for name, held in plan.operators.items() if held.region == wanted)
        return cls(plan=plan, names=region or tuple(find_operators(list(plan.operators), wanted)))

    @classmethod
    def of_model(cls, plan: Plan, graph: Graph, cluster: Cluster, wanted: str | None) -> Explained:
        """The answers from the plan and its model, priced on `cluster`."""
        explained = cls.of_file(plan, wanted)
        analysis = analyse(graph, train=plan.model.mode == "train")
        account = account_of(plan, analysis, cluster) if has_account(plan) else None
        storages = (
            storages_of(plan, analysis, cluster, explained.parameter) if explained.parameter else ()
        )
        named = scheme_of(plan, analysis)
        return dataclasses.replace(
            explained,
            analysis=analysis,
            named=named,
            account=account,
            cluster=cluster,
            storages=storages,
        )

    @property
    def chosen(self) -> list[OperatorAccount]:
        """The accounts of the requested operators."""
        return [
            a
            for a in (self.account.operators if self.account else ())
            if self.names is None or a.operator.name in self.names
        ]

    def parts(self) -> list[str | Table]:
        """Sentences and tables, in the order of printing."""
        return [*self._told(), *self._answers()]

    def beside_plan(self, other: Plan) -> Explained:
        """These answers, with the differences to another plan."""
        if self.names is not None:
            raise UsageError("--diff compares whole plans: leave out OP")
        require_consistent(other)
        return dataclasses.replace(self, beside=other)

    def with_collectives(self) -> Explained:
        """These answers, with the collectives of a step."""
        if self.names is not None:
            raise UsageError(
                "--collectives counts those of the whole plan: leave out OP, which tells its own "
                "with --model"
            )
        return dataclasses.replace(self, talk=True)

    def with_stalls(self) -> Explained:
        """These answers, with what makes the step longer than its computation."""
        if self.names is not None:
            raise UsageError("--stalls is about the whole step: leave out OP")
        assert self.analysis is not None and self.cluster is not None
        return dataclasses.replace(self, stalls=stalls_of(self.plan, self.analysis, self.cluster))

    def with_gap(self, memory: float | None) -> Explained:
        """These answers, with what the bound leaves out within `memory` bytes of a device."""
        if self.names is not None:
            raise UsageError("--gap is about the whole step: leave out OP")
        assert self.analysis is not None and self.cluster is not None
        parts = gap_parts(self.plan, self.analysis, self.cluster, memory=memory)
        return dataclasses.replace(self, gap=parts)

    @property
    def _repriced(self) -> float | None:
        """Seconds of the step as another framework would run it, if one is asked about."""
        return repriced(self.plan, self.analysis, self.cluster)

    def _hidden(self) -> Hidden | None:
        """The hidden part of each collective, if the model is given."""
        if self.account is None or self.analysis is None or self.cluster is None:
            return None
        return hidden_of(self.plan, self.analysis, self.cluster)

    def _told(self) -> list[str | Table]:
        plan = self.plan
        account = self.account
        if self.parameter:
            told = parameter_lines(
                plan, self.parameter, account, self.storages, len(plan.parameters)
            )
            return [*told, *([] if self.analysis else [_HINT])]
        if self.names is None:
            return self._whole()
        if account is None:
            return [
                *(line for name in self.names for line in bare_lines(plan, name)),
                *([] if self.analysis else [_HINT]),
            ]
        return [line for chosen in self.chosen for line in operator_lines(chosen, account)]

    def _whole(self) -> list[str | Table]:
        """The plan in words, then the asked answers, or else all operators and parameters."""
        plan = self.plan
        account = self.account
        lines: list[str | Table] = [
            *summary_lines(plan, f"cluster {plan.cluster}", self.named, self.cluster)
        ]
        lines += repriced_lines(plan, self._repriced, self.cluster)
        if self.cluster is not None:
            lines += certainty_lines(plan, self.cluster)
            lines += kernel_lines(plan, self.cluster)
        if self.beside is not None:
            lines += difference_lines(plan, self.beside)
        if self.talk:
            lines += collectives_parts(plan, account, self._hidden())
        if self.stalls is not None:
            lines += stalls_parts(plan, self.stalls)
        if self.gap is not None:
            lines += gap_parts_told(self.gap)
        asked = (self.pinned, self.flips, self.talk, self.stalls, self.gap, self.beside)
        if any(asked):
            return lines
        if self.analysis is not None:
            lines += unequal_lines(plan, self.analysis)
        if plan.stages:
            lines.append(stages_table(plan))
        lines.append(
            operators_table(groups_of(account), account)
            if account
            else bare_table(plan, plan.operators)
        )
        return [*lines, storage_table(plan), *([] if self.analysis else [_HINT])]

    def _answers(self) -> list[Table]:
        """The tables of the further answers: alternatives, pins, flips, differences."""
        axes = [axis.name for axis in self.plan.mesh]
        tables = []
        if self.storages:
            step = self.plan.predicted.step
            tables.append(alternatives_table(self.storages, axes, step, "parameter were stored"))
        if self.others:
            tables.append(alternatives_table(self.others, axes, self.step))
        if self.pinned:
            tables.append(pinned_table(self.pinned, self.plan))
        if self.flips:
            tables.append(flips_table(self.flips, self.base))
        if self.beside is not None:
            tables += difference_tables(self.plan, self.beside)
        return tables

    def json(self) -> dict[str, Any]:
        """All answers as one object: seconds and bytes."""
        plan = self.plan
        account = self.account
        out: dict[str, Any] = {
            "cluster": plan.cluster,
            "framework": plan.framework,
            "mesh": {axis.name: axis.size for axis in plan.mesh},
            "model": plan.model.name,
        }
        if self.names is None:
            out |= {
                "predicted": plan.predicted.model_dump(mode="json"),
                "provenance": plan.provenance.model_dump(mode="json"),
            }
            out |= certainty_json(plan, self.cluster) if self.cluster is not None else {}
            if self.cluster is not None and (step := self._repriced) is not None:
                out["repriced"] = {"framework": self.cluster.framework.name, "step": step}
            out["routing"] = plan.routing and plan.routing.model_dump(mode="json")
            out["groups"] = [group_json(group) for group in groups_of(account)] if account else None
        if self.parameter:
            stored = plan.parameters[self.parameter].model_dump(mode="json")
            out |= {
                "parameter": self.parameter,
                "stored": stored,
                "storages": [dataclasses.asdict(other) for other in self.storages],
            }
        names = plan.operators if self.names is None else self.names
        out["operators"] = (
            [operator_json(chosen, account) for chosen in self.chosen]
            if account
            else self._bare(names)
        )
        if self.named is not None:
            out |= {
                "scheme": self.named.scheme,
                "sentence": self.named.sentence,
                "schemes": dict(self.named.axes),
            }
        if self.others:
            out |= {
                "best": self.step,
                "alternatives": [dataclasses.asdict(other) for other in self.others],
            }
        if self.pinned:
            out["pinned"] = [dataclasses.asdict(other) for other in self.pinned]
        if self.flips:
            out |= {"base": self.base, "flips": [dataclasses.asdict(flip) for flip in self.flips]}
        return out | self._step_json()

    def _step_json(self) -> dict[str, Any]:
        """The answers about the whole step, as far as they are asked for."""
        out: dict[str, Any] = {}
        if self.talk:
            out["collectives"] = collectives_json(self.plan, self.account, self._hidden())
        if self.stalls is not None:
            out["stalls"] = stalls_json(self.stalls)
        if self.gap is not None:
            out["gap"] = gap_json(self.gap)
        if self.beside is not None:
            out["difference"] = difference_json(self.plan, self.beside)
        return out

    def _bare(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Operators from the plan file alone; a stage's operators are split over its mesh."""
        meshes = self.plan.meshes()
        operators = []
        for name in names:
            held = self.plan.operators[name]
            axes = [axis.name for axis in meshes[name]]
            operators.append(
                {
                    "name": name,
                    "kind": held.kind,
                    "strategy": dict(zip(axes, held.strategy, strict=True)),
                }
            )
        return operators


_HINT = "\nwith --model MODEL: the rule, local shapes, and what belongs to which operator as well"
