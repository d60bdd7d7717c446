"""What the report says: sentences, tables and pictures by section, made from a plan and from its model where that is at hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from autopar.costmodel import Cluster
from autopar.costmodel.intervals import memory_interval, step_interval

from ...ir import Graph
from ...plan import Plan
from ...plan_checks import require_consistent
from ...planning.request import default_limit
from ...schemes import Named, scheme_of
from ...sharding.analysis import analyse
from ..account import Account, account_of, has_account
from ..certainty import certainty_lines
from ..explain import storage_table
from ..stages import stages_table
from ..tables import Rival, Table, comparison_table, summary_lines
from ..units import bytes_text, seconds_text
from ..words import COLLECTIVES
from .difference import difference_tables
from .drawing import WAITING, Bar, bars, timeline
from .modules import Tree, tree_of
from .spans import Timeline, timeline_of

ROOM = 250_000
"""Characters that a table may take, roughly."""
TIMES = ("forward", "backward", "update", "communication", "overlapped", "bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with sentences, pictures and tables."""

    anchor: str
    title: str
    told: tuple[str, ...] = ()
    pictures: tuple[Markup, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The whole report: sections, and the operators as a tree."""

    title: str
    sections: tuple[Section, ...]
    tree: Tree
    parameters: Table

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        other: Plan | None = None,
        graph: Graph | None = None,
        cluster: Cluster | None = None,
        rivals: Sequence[Rival] = (),
    ) -> Contents:
        """The report of `plan`; `other`: a plan to compare with; `rivals`: what the known schemes would cost."""
        require_consistent(plan)
        account, named = None, None
        if graph is not None and cluster is not None:
            analysis = analyse(graph, train=plan.model.mode == "train")
            named = scheme_of(plan, analysis)
            account = account_of(plan, analysis, cluster) if has_account(plan) else None
        sections = [_summary(plan, named, cluster), _time(plan, timeline_of(plan, graph, cluster)), _memory(plan, cluster)]
        sections.append(_communication(plan, account))
        sections += [_schemes(plan, named, rivals, cluster)] if rivals else []
        if other is not None:
            tables = tuple(map(shortened, difference_tables(plan, other)))
            sections.append(Section(anchor="difference", title="Beside the other plan", tables=tables))
        return cls(
            title=f"Plan of {plan.model.name} on {plan.devices} devices of {plan.cluster}", sections=tuple(sections),
            tree=tree_of(plan, account), parameters=shortened(storage_table(plan)),
        )  # fmt: skip


def shortened(table: Table) -> Table:
    """The rows that fit in the room of a table, and how many more there are."""
    rows: list[tuple[str, ...]] = []
    left = ROOM
    for row in table.rows:
        left -= sum(map(len, row)) + 10 * len(row)
        if left < 0:
            rows.append((f"and {len(table.rows) - len(rows)} more rows", *([""] * (len(row) - 1))))
            break
        rows.append(row)
    return replace(table, rows=tuple(rows))


def _summary(plan: Plan, named: Named | None, cluster: Cluster | None) -> Section:
    told = summary_lines(plan, f"cluster {plan.cluster}" + (f"; {cluster.inventory}" if cluster else ""), named)
    told += certainty_lines(plan, cluster) if cluster else ["The cluster is no preset: give --cluster FILE for limits and intervals."]
    return Section(anchor="summary", title="Summary", told=tuple(told))


def _time(plan: Plan, drawn: Timeline) -> Section:
    p = plan.predicted
    rows = [(name, seconds_text(getattr(p, name)), _share(getattr(p, name), p.step)) for name in TIMES]
    figures = Table(title="Seconds of the slowest stage", columns=("part", ">seconds", ">share of the step"), rows=tuple(rows))
    pictures = [timeline(drawn, f"Timeline of a step of {seconds_text(p.step)}: lanes of forward, backward, update and communication")]
    tables = [figures]
    if plan.stages:
        pictures.append(bars(_stage_bars(plan), "Seconds of every stage: compute, communication, waiting"))
        tables.append(stages_table(plan))
    tables.append(_lanes(drawn))
    title = "Stages and the step's timeline"
    return Section(anchor="time", title=title, told=(drawn.told,), pictures=tuple(pictures), tables=tuple(tables))


def _lanes(drawn: Timeline) -> Table:
    """What the timeline shows, in numbers."""
    rows = []
    for lane in drawn.lanes:
        sums = {kind: sum(span.end - span.start for span in lane.spans if span.kind == kind) for kind in _KINDS}
        rows.append((lane.name, *map(seconds_text, sums.values())))
    return Table(title="The timeline's lanes", columns=("lane", *(f">{kind}" for kind in _KINDS)), rows=tuple(rows))


_KINDS = ("forward", "backward", "update", "collective", "waiting")


def _stage_bars(plan: Plan) -> list[Bar]:
    """What each stage computes, sends and waits in a step; the chunks of a stage added up."""
    count, stages = plan.schedule.micro_batches, len(plan.stages) // plan.schedule.interleave
    found = []
    for number in range(stages):
        held = plan.stages[number::stages]
        moved, once = sum(s.moved for s in held), sum(s.once for s in held)
        compute = count * sum(s.forward + s.backward for s in held) - moved
        waits = max(plan.predicted.step - compute - moved - once - plan.predicted.update, 0.0)
        parts = (("compute", compute), ("communication", moved + once), ("update", plan.predicted.update), (WAITING, waits))
        shown = tuple((name, max(seconds, 0.0), seconds_text(max(seconds, 0.0))) for name, seconds in parts)
        found.append(Bar(name=f"stage {number}", parts=shown, text=f"busy {seconds_text(compute + moved + once)}"))
    return found


def _memory(plan: Plan, cluster: Cluster | None) -> Section:
    p = plan.predicted
    parts = tuple((name, size, bytes_text(size)) for name, size in p.memory_parts.items() if size)
    interval = memory_interval()
    around = (p.memory * interval.low, p.memory * interval.high)
    rows = [Bar(name="fullest device", parts=parts, text=bytes_text(p.memory), interval=around)]
    stages = len(plan.stages) // plan.schedule.interleave
    for number in range(stages):
        size = max(s.memory for s in plan.stages[number::stages])
        rows.append(Bar(name=f"stage {number}", parts=(("whole", size, bytes_text(size)),), text=bytes_text(size)))
    limit = min(default_limit(pool) for pool in cluster.pools) if cluster else None
    marked = (limit, f"limit {bytes_text(limit)}") if limit else None
    told = [f"Nine runs in ten need {bytes_text(around[0])} to {bytes_text(around[1])} where {bytes_text(p.memory)} are predicted."]
    told += [f"A device has room for {bytes_text(limit)} ({p.memory / limit:.0%} of it is used)."] if limit else []
    told += [f"{bytes_text(p.host_memory)} beside, in the memory of the device's host."] if p.host_memory else []
    table = Table(
        title="Memory of the fullest device", columns=("kind", ">bytes", ">share"),
        rows=(*((name, text, _share(size, p.memory)) for name, size, text in parts), ("total", bytes_text(p.memory), "100%")),
    )  # fmt: skip
    drawn = bars(rows, "Memory per device by kind, with the limit and the interval of predictions", limit=marked)
    return Section(anchor="memory", title="Memory per device", told=tuple(told), pictures=(drawn,), tables=(table,))


def _communication(plan: Plan, account: Account | None) -> Section:
    """By axis and level, phase and kind; from the plan file, of one micro-batch where there are stages."""
    levels = {axis.name: axis.level for stage in ((plan.mesh), *(s.mesh for s in plan.stages)) for axis in stage}
    issued = [(c.axis, c.phase, c.kind, c.nbytes, c.seconds) for c in plan.collectives]
    if account is not None:
        every = [pair for a in account.operators for pair in a.collectives] + [pair for u in account.units for pair in u.collectives]
        issued = [(account.axes[c.axis], c.phase, c.kind, c.nbytes, seconds) for c, seconds in every]
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for axis, phase, kind, nbytes, seconds in issued:
        found = sums[axis, phase, COLLECTIVES.get(kind, kind)]
        found[0], found[1], found[2] = found[0] + 1, found[1] + nbytes, found[2] + seconds
    rows = tuple(
        (axis, levels.get(axis, ""), phase, kind, str(int(n)), bytes_text(nbytes), seconds_text(seconds))
        for (axis, phase, kind), (n, nbytes, seconds) in sums.items()
    )
    drawn = []
    for axis, level in levels.items():
        parts = tuple((f"{kind}, {phase}", s[2], seconds_text(s[2])) for (a, phase, kind), s in sums.items() if a == axis)
        drawn.append(Bar(name=f"{axis} ({level})", parts=parts, text=seconds_text(sum(value for _, value, _ in parts))))
    columns = ("axis", "level", "phase", "collective", ">times", ">bytes", ">seconds")
    told = ["Collectives of a step." if account or not plan.stages else "Collectives of one micro-batch; --model counts those of a step."]
    told += [] if rows else ["Nothing is communicated."]
    label = "Seconds of communication by mesh axis"
    table = Table(title="Collectives by axis and level", columns=columns, rows=rows)
    return Section(anchor="communication", title="Communication", told=tuple(told), pictures=(bars(drawn, label),), tables=(table,))


def _schemes(plan: Plan, named: Named | None, rivals: Sequence[Rival], cluster: Cluster | None) -> Section:
    around = step_interval(cluster) if cluster else None
    rows = []
    for name, step in (("plan found", plan.predicted.step), *((r.name, r.step) for r in rivals if r.step is not None)):
        interval = (step * around.low, step * around.high) if around else None
        rows.append(Bar(name=name, parts=(("step", step, seconds_text(step)),), text=seconds_text(step), interval=interval))
    table = comparison_table(plan, named.called if named else "", rivals)
    drawn = bars(rows, "Predicted step of the plan and of the known schemes, with intervals")
    return Section(anchor="schemes", title="Beside known schemes", pictures=(drawn,), tables=(table,))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""
