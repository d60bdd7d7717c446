"""The `training`, `parallelism` and `activation_checkpoint` sections of a torchtitan configuration.

The format is TOML, as torchtitan reads it up to 0.2. Later versions take the same names on the
command line (`--parallelism.tensor_parallel_degree 8`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from autopar.order import schedules

from .setup import Converted, Setup

TARGET = "torchtitan"
SCHEDULES = {
    row.name: row.other_names.torchtitan
    for row in schedules.SCHEDULES.values()
    if row.other_names.torchtitan
}
OPTIMIZERS = {"adamw": "AdamW"}
TYPES = ("float32", "bfloat16")


def torchtitan(setup: Setup) -> Converted:
    """The sections, to be merged into a model's configuration."""
    setup.refuse(TARGET, *_lacks(setup))
    lost = [*setup.lost, *setup.minor(), *_losses(setup)]
    sections: dict[str, Mapping[str, object]] = {
        "training": _training(setup),
        "parallelism": _parallelism(setup),
        "activation_checkpoint": {"mode": setup.recompute},
        "optimizer": {"name": OPTIMIZERS[setup.plan.model.optimizer]},
    }
    return Converted(text=_toml(sections, lost), lost=tuple(lost))


def _lacks(setup: Setup) -> Iterable[str]:
    """Parts of a plan that torchtitan cannot do."""
    yield from setup.mixed()
    if setup.plan.model.mode == "infer":
        yield "inference"
    yield setup.pipeline_beyond(SCHEDULES)
    yield setup.split_beyond()
    yield setup.optimizer_beyond(OPTIMIZERS)


def _losses(setup: Setup) -> Iterable[str]:
    """Sentences on parts of a plan that become something else."""
    if setup.degree("tensor") > 1 and not setup.sequence_parallel:
        yield (
            "activations between tensor-parallel layers are split along the sequence there; the "
            "plan keeps them whole"
        )
    if setup.recompute == "selective":
        yield "its selective recompute keeps other operators than the plan"
    if setup.zero == 1:
        yield "gradients are reduced at every micro-batch (ZeRO 2)"


def _training(setup: Setup) -> Mapping[str, object]:
    # With stages, torchtitan cuts the local batch of a whole step into micro-batches itself.
    local = setup.local_batch
    if setup.stages > 1:
        local = setup.batch // setup.degree("data", "expert")
    table: dict[str, object] = {"local_batch_size": local, "global_batch_size": setup.batch}
    if setup.sequence:
        table["seq_len"] = setup.sequence
    if dtype := setup.parameter_type(TYPES):
        table["mixed_precision_param"] = dtype
    if setup.plan.schedule.reduce in TYPES:
        table["mixed_precision_reduce"] = setup.plan.schedule.reduce
    return table


def _parallelism(setup: Setup) -> Mapping[str, object]:
    shards = setup.shards if setup.zero else 1
    table: dict[str, object] = {
        "data_parallel_replicate_degree": setup.degree("data") // shards,
        "data_parallel_shard_degree": shards * setup.degree("expert"),
        # The value "default" depends on whether there are stages, so the plan's own is written.
        "fsdp_reshard_after_forward": "always" if setup.zero == 3 else "never",
        "tensor_parallel_degree": setup.degree("tensor"),
        "context_parallel_degree": setup.degree("sequence"),
        "expert_parallel_degree": setup.degree("expert"),
        "pipeline_parallel_degree": setup.stages,
    }
    if setup.stages > 1:
        table["pipeline_parallel_schedule"] = SCHEDULES[setup.plan.schedule.pipeline]
        table["pipeline_parallel_microbatch_size"] = setup.local_batch
    return table


def _toml(sections: Mapping[str, Mapping[str, object]], lost: Sequence[str]) -> str:
    lines = [f"# {note}" for note in lost]
    for name, values in sections.items():
        lines += [
            "",
            f"[{name}]",
            # Numbers and texts without odd characters are written alike in JSON and in TOML.
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
        ]
    return "\n".join(lines).lstrip("\n") + "\n"
