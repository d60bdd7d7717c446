"""Pipelines whose passes are merged are written for Megatron-LM and come back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.integrations.convert import convert
from autopar.integrations.importing import Hardware, import_configuration, read_configuration
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.sharding.layer_numbers import between_layers
from autopar.sharding.rules import is_product
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("mixtral")
    (folder / "config.json").write_text(
        json.dumps(small_configuration("mixtral") | {"num_hidden_layers": 4})
    )
    return load_any(f"hf:{folder}", ModelOptions(batch=8, dtype="float32", dims={"sequence": 16}))


def _plan(model: LoadedModel, chunks: int) -> Plan:
    return plan_loaded(
        model,
        devices=4,
        cluster="local-cpu",
        scheme="pipeline-merged_1f1b 2 x expert 2",
        interleave=chunks,
        micro_batches=4,
        cuts=between_layers((op.name, is_product(op.kind)) for op in model.graph.operators),
    ).plan


def test_several_chunks_a_stage_come_back(model: LoadedModel, tmp_path: Path) -> None:
    plan = _plan(model, 2)
    (tmp_path / "back.sh").write_text(convert(plan, "megatron").text)
    configuration = read_configuration(tmp_path / "back.sh")
    assert configuration.arguments["overlap-moe-expert-parallel-comm"] == ""
    here = Hardware(devices=4, cluster="local-cpu", target="autopar")
    back = import_configuration(configuration, model, here, compare=False).planned.plan
    assert back.schedule == plan.schedule and back.schedule.pipeline == "merged_1f1b"
    assert back.stages == plan.stages


def test_one_chunk_a_stage_is_refused(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="merged passes of stages that hold one chunk each"):
        convert(_plan(model, 1), "megatron")


def test_without_experts_or_chunks_nothing_is_merged(tmp_path: Path) -> None:
    for arguments in (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ):
        (tmp_path / "run.sh").write_text(
            "torchrun pretrain_gpt.py --tensor-model-parallel-size 1 "
            f"{arguments} --overlap-moe-expert-parallel-comm\n"
        )
        assert read_configuration(tmp_path / "run.sh").schedule in ("1f1b", "interleaved")
