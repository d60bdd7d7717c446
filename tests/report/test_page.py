"""The report: well-formed pages that ask for nothing, say in tables what pictures show, and keep
names of strangers as text.
"""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
from pathlib import Path

import pytest
from report_models import MEGATRON, planned

from autopar.analysis.searches.rivals import Rival
from autopar.cli import run
from autopar.costmodel import load_cluster
from autopar.errors import PlanError, UsageError
from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan, StagePlan
from autopar.report.page import Compared, Contents, figures, page
from autopar.report.page.drawing import UNITS, timeline
from autopar.report.page.modules import tokens
from autopar.report.page.spans import timeline_of
from autopar.sharding.analysis import analyse

VOID = {"meta", "input", "line"}
EVIL = "h.0/<script>alert(1)</script>\"'\x1b[2J‮/{{ 7*7 }}/&amp;MatMul"


class Page(html.parser.HTMLParser):
    """The tags of a page; `wrong`: end tags that close nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def attributes_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(pins=MEGATRON).plan


@pytest.fixture(scope="module")
def staged() -> Plan:
    return planned(
        layers=4,
        mesh=(2,),
        scheme="data",
        stages=2,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        zero=0,
    ).plan


def texts(plan: Plan, staged: Plan) -> dict[str, str]:
    """Pages of every sort."""
    planned_model = planned(pins=MEGATRON)
    rivals = [
        Rival(scheme="data", step=0.5, memory=1e9, fits=True, named="data"),
        Rival(scheme="3d", why="no mesh"),
    ]
    return {
        "file": page(Contents.of(plan)),
        "staged": page(Contents.of(staged)),
        "two": page(Contents.of(plan, compared=Compared(other=staged))),
        "model": page(
            Contents.of(
                planned_model.plan,
                graph=planned_model.model.graph,
                cluster=planned_model.cluster,
                compared=Compared(rivals=rivals),
            )
        ),
    }


def test_pages_are_well_formed_and_ask_for_nothing(plan: Plan, staged: Plan) -> None:
    for name, text in texts(plan, staged).items():
        parsed = Page(text)
        assert not parsed.wrong and not parsed.open, name
        attributes = [pair for _, held in parsed.tags for pair in held.items()]
        assert not [
            pair
            for pair in attributes
            if pair[0] in ("src", "srcset", "action", "style") or pair[0].startswith("on")
        ]
        assert all((value or "").startswith("#") for key, value in attributes if key == "href")
        assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|innerHTML|eval\(", text)
        (policy,) = [
            m["content"]
            for m in parsed.attributes_of("meta")
            if m.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policy and policy.startswith("default-src 'none'; ")
        for tag in ("style", "script"):
            inside = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            assert inside
            assert (
                f"{tag}-src "
                f"'sha256-{base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()}'"
                in policy
            )


def test_pages_are_read_without_eyes(plan: Plan, staged: Plan) -> None:
    for text in texts(plan, staged).values():
        parsed = Page(text)
        assert (
            parsed.attributes_of("html")[0]["lang"] == "en" and len(parsed.attributes_of("h1")) == 1
        )
        assert all(
            svg["role"] in ("img", "group") and svg["aria-label"]
            for svg in parsed.attributes_of("svg")
        )
        assert all(
            div["aria-label"] and div["tabindex"] == "0" for div in parsed.attributes_of("div")
        )
        assert all(cell["scope"] == "col" for cell in parsed.attributes_of("th"))
        names = [held["id"] for _, held in parsed.tags if "id" in held]
        assert len(names) == len(set(names))
        assert {a["href"] for a in parsed.attributes_of("a")} <= {f"#{name}" for name in names}
        assert {held["aria-labelledby"] for held in parsed.attributes_of("section")} <= set(names)


def test_pages_say_what_there_is(plan: Plan, staged: Plan) -> None:
    actual = texts(plan, staged)
    assert (
        "Beside known schemes" in actual["model"]
        and "Not possible here: 3d (no mesh)" in actual["model"]
    )
    assert "column-parallel" in actual["model"]
    assert "Beside known schemes" not in actual["file"] and "splits" in actual["file"]
    assert "stage 1" in actual["staged"] and "Stages: seconds of a step" in actual["staged"]
    assert "Operators with another strategy" in actual["two"] and "Figures" in actual["two"]
    assert actual["file"] == page(Contents.of(plan))


def test_names_stay_text(plan: Plan) -> None:
    names = list(plan.operators)
    operators = {EVIL if name == names[0] else name: held for name, held in plan.operators.items()}
    model = plan.model.model_copy(update={"name": EVIL})
    parameters = {f"{EVIL}{name}": held for name, held in plan.parameters.items()}
    evil = plan.model_copy(
        update={"operators": operators, "model": model, "cluster": EVIL, "parameters": parameters}
    )
    text = page(Contents.of(evil, compared=Compared(other=plan)))
    parsed = Page(text)
    assert not parsed.wrong and not parsed.open and len(parsed.attributes_of("script")) == 1
    assert "&lt;script&gt;" in text and "{{ 7*7 }}" in text and "\\x1b" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_the_timeline_is_the_step(plan: Plan, staged: Plan) -> None:
    for each in (plan, staged):
        drawn = timeline_of(each, None, None)
        assert drawn.seconds == pytest.approx(each.predicted.step, rel=0.3)
        for lane in drawn.lanes:
            assert all(
                a.end <= b.start + 1e-12 for a, b in zip(lane.spans, lane.spans[1:], strict=False)
            )
    lanes = timeline_of(staged, None, None).lanes
    assert [sum(s.kind == "forward" for s in lane.spans) for lane in lanes] == [4, 4]
    assert {"waiting", "backward"} <= {s.kind for lane in lanes for s in lane.spans}


def test_what_a_device_does_adds_up_to_the_step(plan: Plan, staged: Plan) -> None:
    for each in (plan, staged):
        assert sum(figures.times(each).values()) == pytest.approx(each.predicted.step)


def test_pictures_of_time_hold_every_span() -> None:
    """The script draws any part of the step from the starts, lengths and names in the page."""
    planned_model = planned(pins=MEGATRON)
    analysis = analyse(planned_model.model.graph, train=True)
    drawn = timeline_of(planned_model.plan, analysis, planned_model.cluster)
    parsed = Page(timeline(drawn, "a step").svg)
    groups = parsed.attributes_of("g")
    names = next(str(g["data-names"]) for g in groups if g["class"] == "played").split("\n")
    written = [str(g["data-spans"]) for g in groups if g["class"] == "lane"]
    assert len(written) == len(drawn.lanes)
    for lane, text in zip(drawn.lanes, written, strict=True):
        at = 0
        for span, one in zip(lane.spans, text.split(";"), strict=True):
            gap, length, _, name = map(int, one.split(","))
            start = (at + gap) / UNITS * drawn.seconds
            at += gap + length
            assert names[name] == span.name
            assert start == pytest.approx(span.start, abs=2e-7 * drawn.seconds)
            assert at / UNITS * drawn.seconds == pytest.approx(span.end, abs=2e-7 * drawn.seconds)


def test_the_first_table_says_whether_it_fits() -> None:
    planned_model = planned(pins=MEGATRON)
    large = planned_model.plan.predicted.model_copy(update={"memory": 78e9})
    for predicted, said in ((planned_model.plan.predicted, "it fits: "), (large, "it fits in ")):
        plan = planned_model.plan.model_copy(update={"predicted": predicted})
        first = figures.summary(plan, None, planned_model.cluster).first
        assert first is not None and said in dict(first.rows)["Does it fit?"]
        next_ = dict(first.rows)["What next?"]
        assert ("autopar plan --memory 5" in next_) == (predicted is large)


def test_the_parts_of_a_step_are_those_of_its_lanes() -> None:
    """Computation, made longer by transfers, and waits: the picture's sums are the table's."""
    planned_model = planned(layers=4, hidden=256, scheme="zero3")
    plan = planned_model.plan
    drawn = timeline_of(plan, analyse(planned_model.model.graph, train=True), planned_model.cluster)
    parts = figures.times(plan, drawn.slowed)
    assert sum(parts.values()) == pytest.approx(plan.predicted.step)
    (lane,) = drawn.computing().lanes
    computing = sum(s.end - s.start for s in lane.spans if s.kind in ("forward", "backward"))
    waiting = sum(s.end - s.start for s in lane.spans if s.kind == "waiting")
    assert drawn.slowed > 0
    assert computing == pytest.approx(
        sum(took for name, took in parts.items() if name.startswith("computes"))
    )
    assert waiting == pytest.approx(parts["waits for communication"])


def test_large_plans_are_small_pages(staged: Plan) -> None:
    """Tens of thousands of operators that do not fold, 96 stages, a thousand micro-batches."""
    held: OperatorPlan = next(iter(staged.operators.values()))
    operators = {
        f"block_{i}_{'x' * (i % 7)}/sub_{i}/{'a/' * (i % 40)}Op{i}q": held for i in range(30_000)
    }
    stages: tuple[StagePlan, ...] = staged.stages[:1] * 96
    schedule = staged.schedule.model_copy(update={"micro_batches": 1024})
    large = staged.model_copy(
        update={"operators": operators, "stages": stages, "schedule": schedule}
    )
    parameters = {f"weight_{i}q.x": next(iter(staged.parameters.values())) for i in range(30_000)}
    large = large.model_copy(update={"parameters": parameters})
    text = page(Contents.of(large, compared=Compared(other=staged)))
    assert "more rows" in text
    assert len(text) < 5 * 2**20
    assert "further rows are left out" in text and "micro-batches are drawn" in text


def test_paths_have_parts() -> None:
    assert tokens("a" + "/b" * 50)[-1].count("/") == 41


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    out = tmp_path / "report.html"
    plan.save(saved)
    assert run(["report", str(saved), str(saved), "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError, match="the command reads it"):
        run(["report", str(saved), "-o", str(saved)])
    with pytest.raises(PlanError, match="not a strategy checkpoint"):
        run(["report", str(out), "-o", str(tmp_path / "other.html")])


def test_the_parts_of_a_stage_fill_the_step(staged: Plan) -> None:
    """Communication that hides under computation takes no room of its own."""
    slow = staged.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"once": staged.predicted.step}) for stage in staged.stages
            )
        }
    )
    for each, hides in ((staged, False), (slow, True)):
        for bar in figures._stage_bars(each, timeline_of(each, None, None)):
            assert sum(size for _, size, _ in bar.parts) == pytest.approx(each.predicted.step)
            assert ("hides" in bar.text) == hides


@pytest.mark.parametrize(
    ("changed", "cluster", "said"),
    [
        ({"memory": 70e9}, "dgx-h100", "may not fit: autopar plan --memory 5"),
        ({"bubble": 0.5}, None, "stages wait"),
        ({"communication": 0.5, "overlapped": 0.1}, None, "communication waits"),
        ({}, None, "the devices compute"),
    ],
)
def test_the_summary_says_what_is_asked_next(
    plan: Plan, changed: dict[str, float], cluster: str | None, said: str
) -> None:
    quiet = {"step": 1.0, "communication": 0.0, "overlapped": 0.0, "bubble": 0.0, "memory": 1.0}
    predicted = plan.predicted.model_copy(update={**quiet, **changed})
    asked = plan.model_copy(update={"predicted": predicted})
    told = figures._next(asked, load_cluster(cluster) if cluster else None)
    assert said in told and "autopar convert" in told
