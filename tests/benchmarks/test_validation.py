"""Published measurements: the reading of files, the groups, the plots and the command line, on
small invented data.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import AutoparError, UsageError
from benchmarks.validating.groups import collective_groups
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.layers import layer_groups
from benchmarks.validating.missing import Missing
from benchmarks.validating.plots import plot, write_plots
from benchmarks.validating.rows import (
    COLUMNS,
    GRID,
    Row,
    Run,
    Table,
    checked,
    read_tables,
    thinned,
    training_rows,
)
from benchmarks.validating.scores import Group, Sample, Score, score
from benchmarks.validating.sizes import shape_of
from benchmarks.validating.steps import framework, predict
from benchmarks.validating.training import training_groups, work

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(layers=2, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=51200, sequence=128)


def runs(*given: Mapping[str, Any]) -> list[tuple[Row, Run]]:
    """Rows of training steps: a small GPT on 8 devices but for what is given."""
    rows = []
    for number, own in enumerate(given):
        small = {
            "id": f"r{number}",
            "group": "g",
            "model": "GPT",
            "layers": 2,
            "hidden": 1024,
            "heads": 16,
            "kv_heads": 16,
            "ffn": 4096,
            "gpus": 8,
            "seq_len": 128,
            "tp": 2,
            "pp": 1,
            "dp": 4,
            "micro_batch": 1,
            "global_batch": 32,
            "step_time_s": 1.0,
        }
        row = (
            dict.fromkeys(sorted(COLUMNS["steps"]), "")
            | dict(GRID)
            | {name: str(value) for name, value in (small | dict(own)).items()}
        )
        rows.append((row, checked(row, Path("invented.csv"), number)))
    return rows


def told(*, times: float = 1.0, memory: float = 1.0, fits: bool = True) -> Callable[[Row], Any]:
    """A prediction: so many times what was measured or, of rows out of memory, 1 s."""

    def predicted(row: Row) -> Any:
        return SHAPE, SimpleNamespace(
            step=times * float(row["step_time_s"] or 1.0), memory=memory, fits=fits
        )

    return predicted


# --- groups ---


def test_work_is_the_published_count() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), which counts a full recompute (Narayanan et al. 2021,
    appendix).
    """
    [(_, run)] = runs({"global_batch": 512, "recompute": "full"})
    shape = replace(SHAPE, layers=24, hidden=2304, heads=24, kv_heads=24, ffn=9216, sequence=2048)
    b = 512
    s = 2048
    n = 24
    h = 2304
    v = 51200
    assert work(run, shape) == pytest.approx(
        96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h)) / 8
    )


def test_selective_recompute_repeats_the_attention_only() -> None:
    full, selective, none = (
        work(run, SHAPE)
        for _, run in runs(
            *({"recompute": how} for how in ("full", "selective(core attention)", "none"))
        )
    )
    assert full and selective and none
    assert selective - none == pytest.approx(32 * 128 * 2 * 4 * 128 * 1024 / 8)
    assert full - none == pytest.approx(32 * 128 * 2 * (24 * 1024**2 + 4 * 128 * 1024) / 8)


def test_every_row_is_scored_or_counted_with_its_reason() -> None:
    def predicted(row: Row) -> Any:
        if row["id"] == "r5":
            raise UsageError("no such thing")
        if row["id"] == "r1":
            raise Missing("not given: layers")
        if row["id"] == "r8":
            raise ZeroDivisionError("division by zero")
        return told(times=float("nan") if row["id"] == "r13" else 1.0)(row)

    rows = runs(
        {},
        {"layers": ""},
        {"step_time_s": ""},
        {},
        {},
        {},
        {"outcome": "killed"},
        {"step_time_s": "", "step_time_derived_s": 2.0},
        {},
        {"step_time_s": "", "tflops_per_gpu": 100.0, "tflops_kind": "model FLOPs"},
        {},
        {},
        {},
        {},
    )
    [group] = training_groups(rows, predicted)
    assert [s.label.split(":")[0] for s in group.samples] == [
        f"r{n} GPT" for n in (0, 3, 4, 7, 9, 10, 11, 12)
    ]
    by_name = {s.label.split()[0]: s for s in group.samples}
    assert by_name["r7"].measured == 2.0
    assert by_name["r9"].measured == pytest.approx(
        3 * 32 * 128 * (2 * 24 * 1024**2 + 8 * 128 * 1024 + 2 * 1024 * 51200) / 8 / 1e14
    )
    assert len(group.samples) + sum(group.left_out.values()) == len(rows)
    assert set(group.left_out) == {
        "not given: layers",
        "no step time given",
        "refused: no such thing",
        "its outcome is killed",
        "failed: ZeroDivisionError: division by zero",
        "failed: its price is nan",
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"framework": ""}, "not given: framework"),
        ({"network": "pigeons"}, "network not described: pigeons"),
        ({"precision": "int3"}, "precision not described: int3"),
        ({"precision": "bf16 sometimes"}, "precision not described: bf16 sometimes"),
        ({"seq_parallel": "perhaps"}, "seq_parallel not described: perhaps"),
        ({"gpu": "A100-PCIe-80GB"}, "no preset for A100-PCIe-80GB"),
        ({"attn_impl": "magic"}, "attn_impl not described: magic"),
        ({"recompute": "some"}, "recompute not described: some"),
        ({"zero_stage": "auto"}, "zero_stage not described: auto"),
        ({"gpu": "TPU v4"}, "no preset for TPU v4"),
        ({"hidden": ""}, "not given: hidden"),
        ({"experts": 16}, "not given: params_b"),
        ({"experts": 16, "params_b": 0.3}, "not given: topk"),
        ({"experts": 16, "params_b": 9, "topk": 1}, "no layers of experts make 9"),
        ({"global_batch": ""}, "not given: global_batch"),
    ],
)
def test_what_leaves_a_row_open_is_its_reason(change: dict[str, Any], reason: str) -> None:
    [(row, _)] = runs(change)
    with pytest.raises(Missing, match=reason):
        predict(row)


def test_a_row_that_names_a_public_model_has_its_sizes() -> None:
    [(row, _)] = runs(
        {
            "framework": "Megatron-Bridge 26.04 NeMo Container",
            "model": "Qwen3_30B_a3B",
            "layers": "",
            "hidden": "",
            "gpu": "GB200",
        }
    )
    shape = shape_of(row, framework(row))
    assert (shape.layers, shape.hidden, shape.experts, shape.top_k, shape.sequence) == (
        48,
        2048,
        128,
        8,
        128,
    )


def test_rows_out_of_memory_have_no_time_but_a_verdict() -> None:
    rows = runs({"outcome": "OOM", "step_time_s": ""}, {"peak_mem_gib": 2})
    [group] = training_groups(rows, told(fits=False, memory=3.0 * 2**30))
    scored = score(group)
    assert (scored.n, scored.oom, scored.oom_accuracy) == (1, (1, 1, 0, 0), 0.5)
    assert (scored.memory_n, scored.memory_error) == (1, pytest.approx(0.5))


def test_a_divided_group_is_scored_whole_and_in_parts() -> None:
    own = {"group": "alephalpha", "model": "LLAMA 13B"}
    rows = runs(
        own | {"seq_len": 2048},
        own | {"seq_len": 8192},
        own | {"seq_len": 2048},
        {"group": "other"},
    )
    groups = training_groups(rows, told(times=1.1))
    assert {g.name: len(g.samples) for g in groups} == {
        "alephalpha": 3,
        "alephalpha 13B 2048": 2,
        "alephalpha 13B 8192": 1,
        "other": 1,
        "alephalpha without its memory in use": 3,
    }
    assert [score(g).mean_error for g in groups] == pytest.approx([0.1] * 5)


def test_a_sweep_is_one_model_on_the_same_devices() -> None:
    rows = runs(
        {"tp": 1, "dp": 8},
        {"tp": 2},
        {"micro_batch": 2},
        {"gpus": 16},
        {"global_batch": 64},
        {"seq_len": 256},
        {"layers": 3},
    )
    sweeps = [run.sweep for _, run in rows]
    assert len(set(sweeps[:3])) == 1
    assert len(set(sweeps)) == 5


LAYER = "1 layer of GPT, h1024 a16 s128, micro-batch 4, TP2"


def test_a_layer_is_what_a_second_one_adds() -> None:
    """With 10 s + 1 s a layer forward and 20 s + 3 s a layer backward, one layer takes 4 s; what
    surrounds it does not count.
    """
    asked: list[Row] = []

    def predicted(row: Row) -> Any:
        asked.append(row)
        layers = int(row["layers"])
        return replace(SHAPE, layers=layers), SimpleNamespace(
            forward=(10.0 + layers,), backward=(20.0 + 3.0 * layers,)
        )

    cells = [
        ("selective + sequence", LAYER, "2000"),
        ("full recompute", LAYER, "8000"),
        ("baseline", "a layer", "1"),
    ]
    rows = tuple(
        {
            "what": what,
            "gpu": "A100-SXM4-80GB",
            "setting": setting,
            "forward_ms": "1000",
            "backward_ms": "",
            "combined_ms": combined,
        }
        for setting, what, combined in cells
    )
    both, forward, backward = layer_groups(
        Table(kind="layers", name="layer_times", path=Path("l.csv"), rows=rows), predicted
    )
    assert [s.predicted for s in both.samples] == [4.0, 4.0]
    assert [s.measured for s in both.samples] == [2.0, 8.0]
    assert both.left_out == {"its shape is not given": 1}
    assert (score(forward).max_error, score(backward).n) == (0.0, 0)
    assert [(row["recompute"], row["seq_parallel"]) for row in asked] == [
        ("selective", "1")
    ] * 2 + [("full", "0")] * 2
    assert {row["tp"] for row in asked} == {"2"} and {row["global_batch"] for row in asked} == {
        "64"
    }
    tokens = 4 * 128
    per_token = 24 * 1024**2 + 4 * 128 * 1024
    assert both.samples[1].work == pytest.approx(4 * tokens * per_token / 2), (
        "full recompute, without the head"
    )


def test_a_layer_that_is_recomputed_takes_longer() -> None:
    rows = tuple(
        {
            "what": LAYER,
            "gpu": "A100-SXM4-80GB",
            "setting": setting,
            "forward_ms": "1",
            "backward_ms": "1",
            "combined_ms": "2",
        }
        for setting in ("baseline", "selective recompute", "full recompute")
    )
    both, *_ = layer_groups(Table(kind="layers", name="l", path=Path("l.csv"), rows=rows))
    plain, selective, full = (s.predicted or 0.0 for s in both.samples)
    assert plain < selective < full


def test_collectives_are_scored_by_size_and_by_machine() -> None:
    row = dict.fromkeys(sorted(COLUMNS["collectives"]), "") | {
        "tool": "nccl-tests",
        "notes": "",
        "collective": "all_reduce",
        "gpus": "8",
        "nodes": "1",
    }
    machine = {"machine": "DGX/HGX A100-SXM 8-GPU node"}
    rows = (
        row | machine | {"size_bytes": str(2**30), "time_us": "8000"},
        row | machine | {"size_bytes": "65536", "time_us": "50"},
        row | {"machine": "a toaster", "size_bytes": "65536", "time_us": "50"},
        row | machine | {"size_bytes": "big", "time_us": "50"},
    )
    large, small, *machines = collective_groups(
        [Table(kind="collectives", name="c", path=Path("c.csv"), rows=rows)]
    )
    assert (len(large.samples), len(small.samples), sum(large.left_out.values())) == (1, 1, 2)
    assert [len(group.samples) for group in machines] == [2]
    assert [s.measured for s in machines[0].samples] == pytest.approx([8e-3, 50e-6])
    assert collective_groups([]) == []


# --- files ---


def written(folder: Path, name: str, text: str) -> Path:
    """A file in the folder."""
    (folder / name).write_text(text, encoding="utf-8")
    return folder


GRID_FILE = """\
gpus,global_batch,micro_batch,hidden,heads,layers,seq_len,tp,dp,pp,step_time_s
2,16,8,1024,16,24,1024,1,1,2,0.372160
"""


def test_files_are_recognised_by_their_columns(tmp_path: Path) -> None:
    written(tmp_path, "any_name.csv", GRID_FILE)
    written(tmp_path, "b.csv", ",".join(sorted(COLUMNS["collectives"])) + ",more\n")
    written(tmp_path, "c.csv", "accelerator,fp32_tflops\nx,1\n")
    tables, others = read_tables(tmp_path)
    assert [(t.kind, t.name) for t in tables] == [("grid", "any_name"), ("collectives", "b")]
    assert others == ["more of b.csv", "c.csv"]
    [(row, run)] = training_rows(tables)
    assert COLUMNS["steps"] <= set(row)
    assert (run.group, run.heads, run.vocab, run.seconds, run.recompute) == (
        "any_name",
        16,
        51200,
        0.37216,
        "full",
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GRID_FILE.replace("0.372160", "fast"), ["grid.csv", "row 1", "step_time_s", "'fast'"]),
        (GRID_FILE.replace("0.372160", "-1"), ["step_time_s", "'-1'"]),
        (GRID_FILE.replace("1024,16", "many,16"), ["hidden", "'many'"]),
        (GRID_FILE.replace(",0.372160", ""), ["grid.csv", "line 2", "cells"]),
        ("a,b\n1,2\n", ["columns", "busbw_GBps"]),
    ],
)
def test_a_wrong_file_is_named_with_the_place(tmp_path: Path, text: str, names: list[str]) -> None:
    written(tmp_path, "grid.csv", text)
    with pytest.raises(AutoparError) as raised:
        training_rows(read_tables(tmp_path)[0])
    assert all(name in str(raised.value) for name in names), str(raised.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        read_tables(tmp_path / "missing")


def test_thinned_rows_are_spread_over_every_group() -> None:
    rows = runs(*({"group": "a"} for _ in range(10)), {"group": "b"})
    assert [run.id for _, run in thinned(rows, 5)] == ["r0", "r2", "r4", "r6", "r8", "r10"]


# --- what is shown ---


def test_plots_are_well_formed_and_name_their_rows(tmp_path: Path) -> None:
    samples = tuple(
        Sample(label=f"<{m}> & co", sweep=m > 1, measured=m, predicted=2 * m)
        for m in (0.5, 1.0, 20.0)
    )
    groups = [Group(name="a / b", samples=samples), Group(name="empty", samples=())]
    scored = [score(group) for group in groups]
    [path] = write_plots(tmp_path / "plots", groups, scored)
    assert path.name == "a-b.svg"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    dots = root.findall("{*}circle")
    assert (
        next(dot.findtext("{*}title") for dot in dots)
        == "<0.5> & co: measured 0.5, predicted 1 (+100.0%)"
    )
    assert len({dot.get("fill") for dot in dots}) == 2, "a colour for each sweep"
    line = root.find("{*}line")
    assert line is not None
    slope = (float(line.get("y2", "")) - float(line.get("y1", ""))) / (
        float(line.get("x2", "")) - float(line.get("x1", ""))
    )
    for (
        dot
    ) in dots:  # twice the measured: above the line of equality by the same distance everywhere
        over = (
            float(line.get("y1", ""))
            + slope * (float(dot.get("cx", "")) - float(line.get("x1", "")))
            - float(dot.get("cy", ""))
        )
        assert over == pytest.approx(math.log(2) / math.log(40 / 0.5 * 1.15**2) * 368, abs=0.3)


def test_a_plot_of_equal_values_still_has_axes() -> None:
    group = Group(name="g", samples=(Sample(label="a", measured=3.0, predicted=3.0),))
    assert "nan" not in plot(group, Score(n=1)).lower()


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "validation.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_command_line_prints_one_object(tmp_path: Path) -> None:
    rows = (
        "2,16,4,1024,16,24,1024,1,1,2,0.4",
        "2,16,2,1024,16,24,1024,1,1,2,0.5",
        "2,16,8,1024,16,24,1024,2,1,1,0.6",
    )
    rest = "\n".join(rows) + "\n"
    written(tmp_path, "grid.csv", GRID_FILE + rest)
    process = run_script("--data", str(tmp_path), "--json", "--plots", str(tmp_path / "plots"))
    assert process.returncode == 0, process.stderr
    group = json.loads(process.stdout)["groups"]["grid"]
    assert {
        "n",
        "mean_error",
        "max_error",
        "null_error",
        "spearman",
        "regret",
        "oom_accuracy",
    } <= set(group)
    assert (group["n"], group["oom_accuracy"], group["sweeps"]) == (4, None, 1)
    assert 0 < group["mean_error"] <= group["max_error"]
    assert (tmp_path / "plots" / "grid.svg").exists()


def test_the_rows_of_a_group_are_shown_worst_first(tmp_path: Path) -> None:
    written(tmp_path, "grid.csv", GRID_FILE + "2,16,8,1024,16,24,1024,1,1,2,0.000001\n")
    process = run_script("--data", str(tmp_path), "--rows", "grid")
    assert process.returncode == 0, process.stderr
    assert 0 < process.stdout.index("grid-002") < process.stdout.index("grid-001")
    assert run_script("--data", str(tmp_path), "--rows", "gird").stderr.endswith(
        "Perhaps you meant 'grid'?\n"
    )


def test_the_command_line_refuses_a_folder_without_data(tmp_path: Path) -> None:
    process = run_script("--data", str(tmp_path), "--json")
    assert (process.returncode, process.stdout) == (2, "")
    assert "no CSV file" in process.stderr
