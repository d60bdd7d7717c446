"""The figures of a plan in the report: its summary, and the parts of step and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.analysis.program.throughput import Budget, throughput_of
from autopar.costmodel import Cluster
from autopar.costmodel.calibration.intervals import memory_interval
from autopar.plan import Plan
from autopar.planning.model.request import default_limit
from autopar.report.certainty import (
    certainty_lines,
    fit_line,
    fit_text,
    fits_surely,
    memory_to_ask,
    room_of,
    step_around,
)
from autopar.report.stages import stages_table
from autopar.report.tables import Table, gap_text, summary_lines
from autopar.report.throughput import DEFINITION, speed_text, unit_of
from autopar.schemes import Named, stages_of
from autopar.units import amount_text, bytes_text, seconds_text

from .drawing import WAITING, Bar, bars, timeline
from .section import Section, share
from .spans import Lane, Timeline

MOST_LANES = 20
"""The most lanes of a picture with lanes of messages; in larger ones these are only in the table.
"""


def summary(
    plan: Plan,
    named: Named | None,
    cluster: Cluster | None,
    *,
    budget: Budget | None = None,
    slowed: float = 0.0,
    repriced: Sequence[str] = (),
) -> Section:
    """The main figures as a table, and the sentences that `autopar plan` prints.

    `slowed`: seconds by which transfers make computation longer, as of `times`. `repriced`: what
    another framework would take, in a line.
    """
    told = summary_lines(
        plan,
        f"cluster {plan.cluster}" + (f"; {cluster.inventory}" if cluster else ""),
        named,
        cluster,
        budget,
    )
    told += repriced
    if plan.model.flops:
        told.append(f"{DEFINITION}.")
    if cluster:
        told += certainty_lines(plan, cluster)
    else:
        told.append("The cluster is no preset: give --cluster FILE for limits and intervals.")
    first = Table(
        title="At a glance",
        columns=("question", "answer"),
        rows=tuple(_glance(plan, named, cluster, slowed)),
    )
    return Section(anchor="summary", title="Summary", first=first, told=tuple(told))


def _glance(
    plan: Plan, named: Named | None, cluster: Cluster | None, slowed: float
) -> Iterator[tuple[str, str]]:
    p = plan.predicted
    around = step_around(plan, cluster) if cluster else None
    between = (
        f" (nine runs in ten: {seconds_text(p.step * around.low)} to "
        f"{seconds_text(p.step * around.high)})"
        if around
        else ""
    )
    yield (
        "How long does a step take?"
        if plan.model.mode == "train"
        else "How long does an inference take?",
        seconds_text(p.step) + between,
    )
    if p.step > 0:
        speed = throughput_of(plan, cluster)
        of_all = f"{amount_text(speed.samples_per_second)} samples"
        if speed.tokens:
            of_all += f", {amount_text(speed.tokens_per_second)} tokens"
        yield "How much is that a second?", f"{of_all}; {speed_text(speed, unit_of(cluster))}"
    room = room_of(cluster) if cluster else None
    of = f" of {bytes_text(room)} ({p.memory / room:.0%})" if room else ""
    held = memory_interval()
    chance = f"it {fit_text(p.memory, cluster)}: " if cluster else ""
    yield (
        "Does it fit?",
        f"{chance}{bytes_text(p.memory)}{of} on the fullest device (nine runs in ten: "
        f"{bytes_text(p.memory * held.low)} to {bytes_text(p.memory * held.high)})",
    )
    said = [
        f"{share(seconds, p.step)} {words}"
        for words, seconds in sorted(times(plan, slowed).items(), key=lambda part: -part[1])
        if seconds > 0.001 * p.step
    ]
    yield "Where does the time go?", "; ".join(said)
    if named is not None:
        recipe = f" ({named.recipe})" if named.recipe else ""
        yield "What is it called?", named.called + recipe
    stages = f"{stages_of(plan)} stages of " if plan.stages else ""
    used = f"{stages}{' x '.join(f'{axis.name}={axis.size}' for axis in plan.mesh) or 'one device'}"
    yield (
        "How are the devices used?",
        f"{used}. {named.sentence}" if named is not None and named.sentence else used,
    )
    yield "Could it be better?", gap_text(plan)
    yield "What next?", _next(plan, cluster)


def times(plan: Plan, slowed: float = 0.0) -> dict[str, float]:
    """The seconds of a step by what a device does; they add up to the step.

    Communication that hides under computation is none of them, but it slows the computation by
    `slowed` seconds.
    """
    p = plan.predicted
    exposed = max(p.communication - p.overlapped, 0.0)
    return {
        "computes forward": p.forward,
        "computes backward": p.backward,
        "updates parameters": p.update,
        "waits for communication": exposed - slowed,
        **({"computes longer beside communication": slowed} if slowed else {}),
        "waits for other stages": p.bubble,
    }


def _next(plan: Plan, cluster: Cluster | None) -> str:
    """The command that answers what is asked next, by what the step waits for most."""
    p = plan.predicted
    exposed = max(p.communication - p.overlapped, 0.0)
    if cluster and not fits_surely(p.memory, cluster):
        first = (
            f"it may not fit: autopar plan --memory {memory_to_ask(cluster)} asks for one that "
            "fits in 95% of runs"
        )
    elif p.bubble > max(exposed, 0.1 * p.step):
        first = "stages wait: autopar what-if --micro-batches N, or --stages N"
    elif exposed > 0.1 * p.step:
        first = "communication waits: autopar explain PLAN --alternatives"
    else:
        first = "the devices compute: autopar explain PLAN says what bounds each operator"
    return f"{first}; autopar run --check proves it on ranks, autopar convert writes it for others"


def time(plan: Plan, drawn: Timeline) -> Section:
    """The step's timeline, its sums, and the stages."""
    p = plan.predicted
    parts = times(plan, drawn.slowed)
    rows = [*parts.items(), ("in all", sum(parts.values()))]
    if p.overlapped:
        rows.append(("communicates meanwhile, hidden", p.overlapped))
    figures = Table(
        title="What the slowest stage does in a step" if plan.stages else "What a step is made of",
        columns=("a device", ">seconds", ">share of the step"),
        rows=tuple((name, seconds_text(took), share(took, p.step)) for name, took in rows),
    )
    shown = drawn if len(drawn.lanes) <= MOST_LANES else drawn.computing()
    told = [
        drawn.told,
        "In the picture F computes forward, B backward, U updates, C communicates; grey waits.",
    ]
    if shown is not drawn:
        told.append("The lanes of messages are in the table below.")
    pictures = [
        timeline(
            shown,
            f"Timeline of a step of {seconds_text(p.step)}: lanes of forward, backward, update "
            "and communication",
        )
    ]
    tables = [figures]
    if plan.stages:
        pictures.append(
            bars(
                _stage_bars(plan, drawn), "Seconds of every stage: compute, communication, waiting"
            )
        )
        tables.append(stages_table(plan))
    tables.append(_lanes(drawn))
    return Section(
        anchor="time",
        title="The step's timeline",
        told=tuple(told),
        pictures=tuple(pictures),
        tables=tuple(tables),
    )


def _lanes(drawn: Timeline) -> Table:
    """The timeline in numbers."""
    rows = []
    for lane in drawn.lanes:
        rows.append((lane.name, *map(seconds_text, _sums(lane).values())))
    return Table(
        title="The timeline's lanes",
        columns=("lane", *(f">{kind}" for kind in _KINDS)),
        rows=tuple(rows),
    )


def _sums(lane: Lane) -> dict[str, float]:
    """The seconds of a lane by kind."""
    return {
        kind: sum(span.end - span.start for span in lane.spans if span.kind == kind)
        for kind in _KINDS
    }


_KINDS = ("forward", "backward", "update", "collective", "waiting")


def _stage_bars(plan: Plan, drawn: Timeline) -> list[Bar]:
    """The seconds that each stage computes, sends and waits in a step, summed over its chunks.

    They are those of its lane, whose passes hold their communication that nothing hides.
    """
    count = plan.schedule.micro_batches
    stages = stages_of(plan)
    stage_bars = []
    for number, lane in enumerate(drawn.computing().lanes):
        held = plan.stages[number::stages]
        moved = sum(s.moved for s in held)
        sums = _sums(lane)
        passes = (sums["forward"] + sums["backward"]) / drawn.drawn
        compute = min(count * sum(s.forward + s.backward for s in held) - moved, passes)
        # The plan file alone does not tell what hides of the work once a step: it fills the step.
        room = max(plan.predicted.step - compute - sums["update"], 0.0)
        exposed = min(passes - compute + sums["collective"], room)
        hidden = max(moved + sum(s.once for s in held) - exposed, 0.0)
        busy = compute + exposed + sums["update"]
        parts = (
            ("compute", compute),
            ("communication", exposed),
            ("update", sums["update"]),
            (WAITING, room - exposed),
        )
        shown = tuple(
            (name, max(seconds, 0.0), seconds_text(max(seconds, 0.0))) for name, seconds in parts
        )
        stage_bars.append(
            Bar(name=f"stage {number}", parts=shown, text=_busy(busy, hidden, plan.predicted.step))
        )
    return stage_bars


def _busy(busy: float, hidden: float, step: float) -> str:
    """The share of a step in which a stage is busy, and the communication hidden under that."""
    beside = f", hides {seconds_text(hidden)}" if hidden > 0.001 * step else ""
    return f"busy {share(busy, step)}{beside}"


def memory(plan: Plan, cluster: Cluster | None) -> Section:
    """The bytes of a device by kind and by stage, with limit and interval."""
    p = plan.predicted
    parts = tuple((name, size, bytes_text(size)) for name, size in p.memory_parts.items() if size)
    interval = memory_interval()
    around = (p.memory * interval.low, p.memory * interval.high)
    rows = [Bar(name="fullest device", parts=parts, text=bytes_text(p.memory), interval=around)]
    held = _memory_by_stage(plan)
    rows += [
        Bar(name=f"stage {n}", parts=(("all kinds", size, ""),), text=bytes_text(size))
        for n, size in enumerate(held)
    ]
    limit = min(default_limit(pool) for pool in cluster.pools) if cluster else None
    told = [
        f"Nine runs in ten need {bytes_text(around[0])} to {bytes_text(around[1])} where "
        f"{bytes_text(p.memory)} are predicted."
    ]
    if limit:
        told.append(
            f"A plan may take {bytes_text(limit)} of a device, of which {p.memory / limit:.0%} are "
            "used."
        )
    if cluster:
        told.append(f"The {fit_line(p.memory, cluster)}.")
    if p.host_memory:
        beside = bytes_text(p.host_memory)
        told.append(f"{beside} beside, in the memory of the device's host.")
    by_kind = Table(
        title="Memory of the fullest device",
        columns=("kind", ">bytes", ">share"),
        rows=(
            *((name, text, share(size, p.memory)) for name, size, text in parts),
            ("total", bytes_text(p.memory), "100%"),
        ),
    )
    by_stage = Table(
        title="Memory of a device by stage",
        columns=("stage", ">bytes", ">of the limit"),
        rows=tuple(
            (f"stage {number}", bytes_text(size), share(size, limit) if limit else "")
            for number, size in enumerate(held)
        ),
    )
    drawn = bars(
        rows,
        "Memory per device by kind, with the limit and the interval of predictions",
        limit=(limit, f"limit {bytes_text(limit)}") if limit else None,
    )
    return Section(
        anchor="memory",
        title="Memory per device",
        told=tuple(told),
        pictures=(drawn,),
        tables=(by_kind, by_stage),
    )


def _memory_by_stage(plan: Plan) -> list[float]:
    """Bytes of a device of every stage; empty for a plan without stages.

    With interleaving a stage holds several chunks of the model, `stages` apart in the plan.
    """
    if not plan.stages:
        return []
    stages = stages_of(plan)
    return [sum(s.memory for s in plan.stages[number::stages]) for number in range(stages)]
