"""Layouts of plans in the words of projects."""

from __future__ import annotations

import pytest
from convert_models import build

import autopar
from autopar.integrations.convert import TARGETS
from autopar.integrations.convert.words import WORDS, layout_in_words
from autopar.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    given = {"scheme": "data 2 (zero3) x megatron-sp 2", "stages": 1, "micro_batches": 2}
    return autopar.plan(*build(), devices=4, cluster="dgx-h100", target="torchtitan", **given)


def test_every_target_has_words() -> None:
    assert set(WORDS) == set(TARGETS)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("megatron-bridge", "TP 2, DP 2, Megatron-FSDP (optim_grads_params)"),
        ("torchtitan@0.2", "TP 2, dp_shard 2, reshard_after_forward=True"),
        ("transformers", "tp_size 2, fsdp_size 2, free_full_weight"),
        ("deepspeed", "autotp_size 2, DP 2, ZeRO stage 3"),
        ("dtensor", "tensor parallel 2, replicas 2"),
    ],
)
def test_a_layout_is_called_as_its_project_does(plan: Plan, target: str, words: str) -> None:
    assert layout_in_words(plan, target) == f"{words}, micro-batch 2, 2 micro-batches a step"


def test_our_own_runtime_has_none(plan: Plan) -> None:
    assert layout_in_words(plan, "autopar") == ""
    assert f"in its words {layout_in_words(plan, 'torchtitan')}" in plan.summary()
