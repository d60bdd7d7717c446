"""The configuration of DeepSpeed (JSON): batch sizes, ZeRO stage, offload and tensor parallelism."""

from __future__ import annotations

import json
from typing import Any

from .setup import Converted, Setup

TARGET = "deepspeed"
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "lamb": "Lamb"}
TYPES = {"bfloat16": "bf16", "float16": "fp16"}


def deepspeed(setup: Setup) -> Converted:
    """The object as JSON."""
    plan = setup.plan
    tensor = setup.degree("tensor")
    setup.refuse(
        TARGET,
        *setup.mixed(),
        setup.staged() + " (they are written in its PipelineModule, not in the configuration)" if setup.stages > 1 else "",
        setup.lacking("expert", "splitting experts, which is written in its MoE layers"),
        "sequence parallelism between tensor-parallel layers" if setup.sequence_parallel else "",
        f"ZeRO {setup.zero} beside split weights" if tensor > 1 and setup.zero > 2 else "",
        setup.optimizer_beyond(OPTIMIZERS),
        setup.split_beyond(),
    )
    lost = [note for note in (*setup.lost, *setup.minor()) if "host memory" not in note]
    found: dict[str, Any] = {
        "train_batch_size": setup.batch,
        "train_micro_batch_size_per_gpu": setup.local_batch,
        "gradient_accumulation_steps": plan.schedule.micro_batches,
    }
    if plan.model.mode == "train":
        found["optimizer"] = {"type": OPTIMIZERS[plan.model.optimizer], "params": {}}
    found["zero_optimization"] = {"stage": setup.zero, "overlap_comm": True}
    if any(p.state == "host" for p in plan.parameters.values()):
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    types = {p.dtype for p in plan.parameters.values()} & set(TYPES)
    found |= {TYPES[types.pop()]: {"enabled": True}} if len(types) == 1 else {}
    found |= {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    found |= {"sequence_parallel_size": setup.degree("sequence")} if setup.degree("sequence") > 1 else {}
    lost += [f"recompute ({setup.recompute}) is called for in the model's code"] if setup.recompute != "none" else []
    return Converted(text=json.dumps(found, indent=1) + "\n", lost=tuple(lost))
