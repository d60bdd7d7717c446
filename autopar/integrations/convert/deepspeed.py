"""The configuration of DeepSpeed (JSON).

It holds batch sizes, the ZeRO stage, offload and tensor parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .reach import Reach, lacks
from .setup import Converted, Setup

TARGET = "deepspeed"
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "lamb": "Lamb"}
TYPES = {"bfloat16": "bf16", "float16": "fp16"}
SHORT = {**TYPES, "float32": "fp32"}
_WHERE = {
    "stages": "they are written in its PipelineModule, not in the configuration",
    "expert": "its MoE layers write it",
    "sequence": "its sequence parallelism is Ulysses",
}
_COMMON: Mapping[str, Any] = {
    "recomputes": ("none", "full"),
    "optimizers": tuple(OPTIMIZERS),
    "where": _WHERE,
    "infers": True,
}
# It stores parameters split over all ranks of a model, without replicas of the shards.
REACH = (
    Reach(axes=("data", "tensor", "ulysses"), zeros=(0,), **_COMMON),
    Reach(axes=("shard", "tensor"), zeros=(1, 2), hosts=True, **_COMMON),
    Reach(axes=("shard", "ulysses"), zeros=(1, 2, 3), hosts=True, **_COMMON),
)


def deepspeed(setup: Setup) -> Converted:
    """The object as JSON."""
    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup))
    # Offloading is part of this configuration, so nothing of it is left to the target.
    lost = [note for note in (*setup.lost, *setup.minor()) if "host memory" not in note]
    if setup.degree("tensor", "ulysses") > 1:
        lost.append(
            f"the global batch of {setup.batch} is left to the micro-batch and the accumulation: "
            "train_batch_size would count ranks that share samples"
        )
    lost += setup.widened()
    if setup.recompute != "none":
        lost.append(f"recompute ({setup.recompute}) is called for in the model's code")
    text = json.dumps(_configuration(setup), indent=1)
    return Converted(text=text + "\n", lost=tuple(lost))


def _configuration(setup: Setup) -> Mapping[str, Any]:
    plan = setup.plan
    # It multiplies its batch by all ranks, those that share a batch by their weights among them.
    whole = {} if setup.degree("tensor", "ulysses") > 1 else {"train_batch_size": setup.batch}
    configuration: dict[str, Any] = {
        **whole,
        "train_micro_batch_size_per_gpu": setup.local_batch,
        "gradient_accumulation_steps": plan.schedule.micro_batches,
    }
    if plan.model.mode == "train":
        # A plan knows no learning rate: empty `params` give the optimizer's defaults.
        configuration["optimizer"] = {"type": OPTIMIZERS[plan.model.optimizer], "params": {}}
    zero: dict[str, Any] = {"stage": setup.zero, "overlap_comm": True}
    if any(parameter.state == "host" for parameter in plan.parameters.values()):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    configuration["zero_optimization"] = zero
    if dtype := setup.parameter_type(TYPES):
        configuration[TYPES[dtype]] = {"enabled": True}
        # Without these gradients travel and add up in the type of the computation.
        summed = SHORT[plan.schedule.reduce or dtype]
        configuration["communication_data_type"] = summed
        configuration["data_types"] = {"grad_accum_dtype": summed}
    if setup.degree("tensor") > 1:
        configuration["tensor_parallel"] = {"autotp_size": setup.degree("tensor")}
    if setup.degree("ulysses") > 1:
        configuration["sequence_parallel_size"] = setup.degree("ulysses")
    return configuration
