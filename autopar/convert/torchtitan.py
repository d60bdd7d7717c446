"""The `training`, `parallelism` and `activation_checkpoint` sections of a torchtitan configuration.

The format is TOML, as torchtitan reads it up to 0.2. Later versions take the same names on the command line
(`--parallelism.tensor_parallel_degree 8`).
"""

from __future__ import annotations

import json

from .setup import Converted, Setup

TARGET = "torchtitan"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
OPTIMIZERS = {"adamw": "AdamW"}
TYPES = {"float32", "bfloat16"}


def torchtitan(setup: Setup) -> Converted:
    """The sections, to be merged into a model's configuration."""
    plan, schedule = setup.plan, setup.plan.schedule
    setup.refuse(
        TARGET,
        *setup.mixed(),
        "inference" if plan.model.mode == "infer" else "",
        setup.pipeline_beyond(SCHEDULES),
        setup.split_beyond(),
        setup.optimizer_beyond(OPTIMIZERS),
    )
    lost = [*setup.lost, *setup.minor()]
    if setup.degree("tensor") > 1 and not setup.sequence_parallel:
        lost.append("activations between tensor-parallel layers are split along the sequence there; the plan keeps them whole")
    if setup.recompute == "selective":
        lost.append("its selective recompute keeps other operators than the plan")
    if setup.zero == 1:
        lost.append("gradients are reduced at every micro-batch (ZeRO 2)")
    shards = setup.shards if setup.zero else 1
    training: dict[str, object] = {"local_batch_size": setup.batch // setup.degree("data", "expert"), "global_batch_size": setup.batch}
    training |= {"seq_len": setup.sequence} if setup.sequence else {}
    training |= {} if setup.stages > 1 else {"local_batch_size": setup.local_batch}
    types = {p.dtype for p in plan.parameters.values()} & TYPES
    mixed: dict[str, object] = {"mixed_precision_param": types.pop()} if len(types) == 1 else {}
    mixed |= {"mixed_precision_reduce": schedule.reduce} if schedule.reduce in TYPES else {}
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": setup.degree("data") // shards,
        "data_parallel_shard_degree": shards * setup.degree("expert"),
        "fsdp_reshard_after_forward": "always" if setup.zero == 3 else "never",
        "tensor_parallel_degree": setup.degree("tensor"),
        "context_parallel_degree": setup.degree("sequence"),
        "expert_parallel_degree": setup.degree("expert"),
        "pipeline_parallel_degree": setup.stages,
    }
    if setup.stages > 1:
        parallelism |= {"pipeline_parallel_schedule": SCHEDULES[schedule.pipeline], "pipeline_parallel_microbatch_size": setup.local_batch}
    sections: dict[str, dict[str, object]] = {
        "training": training | mixed, "parallelism": parallelism, "activation_checkpoint": {"mode": setup.recompute},
        "optimizer": {"name": OPTIMIZERS[plan.model.optimizer]},
    }  # fmt: skip
    return Converted(text=_toml(sections, lost), lost=tuple(lost))


def _toml(sections: dict[str, dict[str, object]], lost: list[str]) -> str:
    lines = [f"# {note}" for note in lost]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines).lstrip("\n") + "\n"
