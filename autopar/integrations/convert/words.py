"""The layout of a plan in the words of the project that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.plan import Plan

from .setup import Setup, setup_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The names of a plan's degrees in a project.

    `replicas`, `shards`: of the ranks with shares of the batch, those that hold the same parameters
    and those that hold parts of them; "" where one word, `data`, is for both. `zero`: by the stage
    of ZeRO.
    """

    tensor: str = "TP"
    context: str = "CP"
    expert: str = "EP"
    stages: str = "PP"
    chunks: str = "VPP"
    data: str = "DP"
    replicas: str = ""
    shards: str = ""
    zero: Mapping[int, str] = field(default_factory=dict)


_SHARED = {1: "distributed optimizer", 2: "distributed optimizer"}
_RESHARDED = {
    1: "reshard_after_forward=False",
    2: "reshard_after_forward=False",
    3: "reshard_after_forward=True",
}
WORDS: Mapping[str, Words] = {
    "megatron": Words(zero={**_SHARED, 3: "torch FSDP2"}),
    "megatron-bridge": Words(zero={**_SHARED, 3: "Megatron-FSDP (optim_grads_params)"}),
    "torchtitan": Words(replicas="dp_replicate", shards="dp_shard", zero=_RESHARDED),
    "fsdp2": Words(replicas="replicas", shards="fully_shard over", zero=_RESHARDED),
    "accelerate": Words(
        tensor="tp_size",
        context="cp_size",
        replicas="dp_replicate_size",
        shards="dp_shard_size",
        zero=_RESHARDED,
    ),
    "transformers": Words(
        tensor="tp_size",
        replicas="dp_replicate_size",
        shards="fsdp_size",
        zero={2: "keep_full_weight", 3: "free_full_weight"},
    ),
    "deepspeed": Words(
        tensor="autotp_size",
        context="sequence_parallel_size",
        expert="ep_size",
        zero={stage: f"ZeRO stage {stage}" for stage in (1, 2, 3)},
    ),
    "dtensor": Words(tensor="tensor parallel", data="replicas"),
    "pipelining": Words(stages="stages", chunks="chunks a stage", data="replicas"),
}
"""By target, as `convert` writes them (docs/converting.md names the commits)."""


def layout_in_words(plan: Plan, target: str) -> str:
    """The degrees of a plan as a target calls them; "" for a target without words of its own.

    Raises `UsageError` for a plan that no setup has.
    """
    name = target.partition("@")[0]
    if name not in WORDS:
        return ""
    return ", ".join(_parts(setup_of(plan), WORDS[name])) or "one rank"


def _parts(setup: Setup, words: Words) -> Iterator[str]:
    schedule = setup.plan.schedule
    tensor = setup.degree("tensor")
    degrees = [
        (words.tensor, tensor),
        (words.context, setup.degree("sequence", "ulysses")),
        (words.stages, setup.stages),
        (words.chunks, schedule.interleave),
        (words.expert, setup.experts),
    ]
    if words.shards:
        replicas = setup.degree("data") // setup.shards
        # Ranks of experts hold shards of all other parameters.
        shards = setup.shards * setup.degree("expert")
        degrees += [(words.replicas, replicas), (words.shards, shards)]
    else:
        degrees.append((words.data, setup.degree("data", "expert")))
    yield from (f"{word} {degree}" for word, degree in degrees if degree > 1)
    if setup.zero in words.zero:
        yield words.zero[setup.zero]
    yield f"micro-batch {setup.local_batch}"
    if schedule.micro_batches > 1:
        yield f"{schedule.micro_batches} micro-batches a step"
