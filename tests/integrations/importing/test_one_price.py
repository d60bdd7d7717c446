"""The price of an imported run is that of its plan, and there is no other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from autopar.api import plan_loaded
from autopar.costmodel import load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.integrations.convert import convert
from autopar.integrations.importing import Hardware, import_configuration, read_configuration
from autopar.integrations.importing.configuration_plan import framework_of_run
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan
from autopar.report.imported import imported_json, imported_parts
from benchmarks.validating.known.transformer import transformer
from tests.benchmarks.known.hybrid import HYBRID
from tests.benchmarks.known.mixture import MIXTURE

CLUSTER = load_cluster("dgx-h100").sized(8)
TITAN = """[training]
local_batch_size = 2
[parallelism]
{degrees}
"""
MEGATRON = "--bf16 --micro-batch-size 1 --global-batch-size 16 --overlap-grad-reduce {degrees}"


GRAPH = transformer(replace(MIXTURE, layers=4, experts=0), batch=16).graph


def model() -> LoadedModel:
    graph = transformer(replace(MIXTURE, layers=4), batch=16).graph
    return LoadedModel(graph=graph, source=graph, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "text", "pins"),
    [
        (
            "run.toml",
            TITAN.format(degrees="data_parallel_shard_degree = 8"),
            {"scheme": "data 8 (zero3)", "zero": 3, "stages": 1},
        ),
        (
            "experts.toml",
            TITAN.format(degrees="data_parallel_shard_degree = 8\nexpert_parallel_degree = 4"),
            {"scheme": "data 2 (zero3) x expert 4 (zero3)", "zero": 3, "stages": 1},
        ),
        (
            "tensor.sh",
            MEGATRON.format(degrees="--tensor-model-parallel-size 2 --sequence-parallel"),
            {"scheme": "data 4 x megatron-sp 2", "zero": 0, "stages": 1, "micro_batches": 4},
        ),
        (
            "stages.sh",
            MEGATRON.format(
                degrees="--pipeline-model-parallel-size 2 --use-distributed-optimizer "
                "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel"
            ),
            {
                "scheme": "pipeline-1f1b 2 x data 2 (zero1) x megatron-sp 2",
                "zero": 1,
                "stages": 2,
                "micro_batches": 8,
            },
        ),
    ],
)
def test_an_imported_run_has_the_price_of_its_pins(
    name: str, text: str, pins: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    configuration = read_configuration(tmp_path / name)
    here = Hardware(cluster=CLUSTER, devices=8)
    run = import_configuration(configuration, model(), here, compare=False).planned.plan
    asked = {"offload": "none", "overlap_experts": "off", "recompute": "none"} | pins
    planned = plan_loaded(
        model(), cluster=CLUSTER.run_by(framework_of_run(configuration)), **asked
    ).plan
    assert run.framework == framework_of_run(configuration).name != "autopar"
    assert run.predicted.step == pytest.approx(planned.predicted.step, rel=1e-3)
    assert run.predicted.memory == pytest.approx(planned.predicted.memory, rel=1e-3)


SHAPES = {
    "dense": replace(MIXTURE, layers=4, experts=0),
    "experts": replace(MIXTURE, layers=4),
    "state space": HYBRID,
}
FILES = {
    "torchtitan": "run.py",
    "megatron": "run.sh",
    "megatron-bridge": "run.py",
    "deepspeed": "run.json",
    "accelerate": "run.yaml",
}
STAGES = "pipeline-1f1b 2"
RUNS = (
    ("torchtitan", 1, "data 1", ("dense", "state space")),
    ("torchtitan", 64, "data 8 x data 8 (zero3)", SHAPES),
    ("torchtitan", 16, "data 2 (zero3) x expert 8 (zero3)", ("experts", "state space")),
    ("torchtitan", 1024, "data 128 (zero3) x megatron-sp 8", ("dense",)),
    ("torchtitan", 32, f"{STAGES} x data 4 (zero3) x megatron-sp 4", ("dense",)),
    ("megatron", 1, "data 1", ("dense", "state space")),
    ("megatron", 8, "data 8 (zero1)", SHAPES),
    ("megatron", 32, "data 4 (zero1) x expert 8 (zero1)", ("experts", "state space")),
    ("megatron", 64, f"{STAGES} x data 4 (zero1) x expert 8 (zero1)", ("experts",)),
    ("megatron", 8, "data 4 (zero1) x expert+megatron-sp 2", ("experts",)),
    ("megatron", 1024, f"{STAGES} x data 64 (zero1) x megatron-sp 8", ("dense",)),
    ("megatron-bridge", 8, "data 8 (zero1)", SHAPES),
    ("megatron-bridge", 32, "data 4 (zero1) x expert 8 (zero1)", ("experts", "state space")),
    ("megatron-bridge", 256, f"{STAGES} x data 32 (zero1) x megatron-sp 4", ("dense",)),
    ("deepspeed", 1, "data 1", SHAPES),
    ("deepspeed", 64, "data 64 (zero2)", SHAPES),
    ("deepspeed", 1024, "data 1024 (zero3)", SHAPES),
    ("accelerate", 8, "data 8", SHAPES),
    ("accelerate", 1024, "data 128 x data 8 (zero3)", SHAPES),
    ("accelerate", 64, "data 8 (zero3) x megatron 8", ("dense",)),
)


@pytest.mark.parametrize(
    ("target", "devices", "scheme", "kind"),
    [(*run, kind) for *run, kinds in RUNS for kind in kinds],
)
def test_a_plan_comes_back_from_its_target_at_its_price(
    target: str, devices: int, scheme: str, kind: str, tmp_path: Path
) -> None:
    graph = transformer(SHAPES[kind], batch=2 * max(devices, 8)).graph
    loaded = LoadedModel(graph=graph, source=graph, dtype="bfloat16")
    staged = scheme.startswith(STAGES)
    pins: dict[str, Any] = {"recompute": "none", "offload": "none", "overlap_experts": "off"}
    pins |= {"stages": 2 if staged else 1, "micro_batches": 4 if staged else 1}
    cluster = load_cluster("dgx-h100").sized(devices)
    plan = plan_loaded(loaded, cluster=cluster, target=target, scheme=scheme, **pins).plan
    path = tmp_path / FILES[target]
    path.write_text(convert(plan, target).text)
    here = Hardware(cluster=CLUSTER, devices=devices)
    read = read_configuration(path, target)
    back = import_configuration(read, loaded, here, compare=False).planned.plan
    assert back.predicted.step == pytest.approx(plan.predicted.step, rel=1e-3)
    assert back.predicted.memory == pytest.approx(plan.predicted.memory, rel=1e-3)


FOLDED = (
    "--sequence-parallel --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-param-gather "
    "--tp-comm-overlap --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
    "--moe-token-dispatcher-type {dispatcher}"
)


@pytest.mark.parametrize(
    "dispatcher", ["allgather", "alltoall", "flex --moe-flex-dispatcher-backend deepep"]
)
def test_a_run_of_experts_is_written_as_it_was_read(dispatcher: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(MEGATRON.format(degrees=FOLDED.format(dispatcher=dispatcher)))
    here = Hardware(cluster=CLUSTER, devices=8)
    read = read_configuration(tmp_path / "run.sh")
    run = import_configuration(read, model(), here, compare=False).planned.plan
    assert run.target == "megatron"
    converted = convert(run, run.target)
    assert f"--moe-token-dispatcher-type {dispatcher.split()[0]}" in converted.text
    assert "--expert-model-parallel-size 4" in converted.text
    assert "--expert-tensor-parallel-size 1" in converted.text
    (tmp_path / "back.sh").write_text(converted.text)
    back = read_configuration(tmp_path / "back.sh")
    assert framework_of_run(back) == framework_of_run(read)
    same = import_configuration(back, model(), here, compare=False).planned.plan
    assert same.predicted.step == pytest.approx(run.predicted.step, rel=1e-3)
    assert same.predicted.memory == pytest.approx(run.predicted.memory, rel=1e-3)


def test_rows_come_as_the_file_dispatches_them(tmp_path: Path) -> None:
    kinds = {}
    for dispatcher in ("allgather", "alltoall"):
        text = MEGATRON.format(degrees=FOLDED.format(dispatcher=dispatcher))
        (tmp_path / "run.sh").write_text(text)
        here = Hardware(cluster=CLUSTER, devices=8)
        read = read_configuration(tmp_path / "run.sh")
        run = import_configuration(read, model(), here, compare=False).planned.plan
        kinds[dispatcher] = {
            option
            for operator in run.operators.values()
            if operator.kind == "autopar.experts"
            for option in operator.strategy
        }
    assert {"e+t"} <= kinds["alltoall"] and not {"e+t"} & kinds["allgather"]


def test_a_run_is_explained_at_its_own_price(tmp_path: Path) -> None:
    text = MEGATRON.format(degrees=FOLDED.format(dispatcher="flex"))
    (tmp_path / "run.sh").write_text(text)
    here = Hardware(cluster=CLUSTER, devices=8)
    read = read_configuration(tmp_path / "run.sh")
    run = import_configuration(read, model(), here, compare=False).planned.plan
    run.save(tmp_path / "run.json")
    plan = Plan.load(tmp_path / "run.json")
    assert cluster_of_plan(plan).framework == framework_of_run(read)
    for wrong, message in (("dispatch", "unknown habit 'dispatch'"), ("loss", "habit loss")):
        broken = plan.model_copy(update={"habits": {wrong: 3.0}})
        with pytest.raises(UsageError, match=message):
            cluster_of_plan(broken)


def test_what_changes_towards_the_plan_found_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        MEGATRON.format(degrees="--tensor-model-parallel-size 8 --recompute-granularity full")
    )
    dense = LoadedModel(graph=GRAPH, source=GRAPH, dtype="bfloat16")
    here = Hardware(cluster=CLUSTER, devices=8)
    imported = import_configuration(read_configuration(tmp_path / "run.sh"), dense, here)
    assert imported.free is not None and imported.free.plan.target == "megatron"
    told = imported_json(imported)["best"]["changes"]
    assert told["--tensor-model-parallel-size"] == ["8", "1"]
    assert told["--recompute-granularity"] == ["full", None]
    lines = [part for part in imported_parts(imported, None) if isinstance(part, str)]
    assert any(line.startswith("found for megatron: ") for line in lines)
    assert "  --tensor-model-parallel-size: 8 -> 1" in lines


def _plan(path: Path) -> object:
    return plan_loaded(model(), cluster=CLUSTER, stages=1)


def _import(path: Path) -> object:
    path.write_text(TITAN.format(degrees="data_parallel_shard_degree = 8"))
    here = Hardware(cluster=CLUSTER, devices=8)
    return import_configuration(read_configuration(path), model(), here)


@pytest.mark.parametrize("command", [_plan, _import])
def test_nothing_is_priced_beside_the_prices_of_meshes(
    command: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise ArithmeticError("no price")

    for name in ("lines", "seconds"):
        monkeypatch.setattr(MeshPrices, name, broken)
    with pytest.raises(ArithmeticError, match="no price"):
        command(tmp_path / "run.toml")
