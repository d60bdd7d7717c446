"""The configuration of Hugging Face accelerate (YAML): FSDP2, and degrees of parallelism.

It is read by `accelerate launch --config_file`.
"""

from __future__ import annotations

from collections.abc import Iterable

from .reach import PARTLY, Reach, lacks
from .setup import Converted, Setup

TARGET = "accelerate"
VERSION = "1.15.0"
"""The release whose names and values are written."""
TYPES = {"bfloat16": "bf16", "float16": "fp16"}
SHARDED = ("data", "shard", "context", "tensor")
REACH = (
    Reach(axes=("tensor",), zeros=(0,)),
    Reach(axes=("data",), zeros=(0,)),
    # While micro-batches are added up gradients stay whole, and are reduced once.
    Reach(axes=SHARDED, needed=("shard",), zeros=(1, 3), near=(2, *PARTLY)),
)


def accelerate(setup: Setup) -> Converted:
    """The file."""
    import yaml  # a machine with GPUs that only runs plans may lack it

    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup))
    lost = (*setup.lost, *setup.minor(), *_losses(setup))
    lines = [f"# The configuration of accelerate {VERSION}.", *(f"#   {note}" for note in lost)]
    table = yaml.safe_dump(_configuration(setup), sort_keys=False)
    return Converted(text="\n".join([*lines, table]), lost=lost)


def _configuration(setup: Setup) -> dict[str, object]:
    sharded = setup.shards > 1
    dtype = setup.parameter_type(TYPES) if setup.plan.schedule.master else None
    configuration: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "num_processes": setup.ranks,
        "mixed_precision": TYPES[dtype] if dtype else "no",
    }
    if sharded:
        configuration["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": setup.zero == 3,
            "fsdp_activation_checkpointing": setup.recompute != "none",
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if sharded or setup.degree("tensor") > 1:
        degrees = {
            "dp_replicate_size": setup.degree("data") // setup.shards,
            "dp_shard_size": setup.shards,
            "tp_size": setup.degree("tensor"),
            "cp_size": setup.degree("sequence"),
        }
        configuration["parallelism_config"] = {
            f"parallelism_config_{name}": size for name, size in degrees.items()
        }
    return configuration


def _losses(setup: Setup) -> Iterable[str]:
    """Sentences on parts of a plan that are set elsewhere, or become something else."""
    yield (
        f"batches of {setup.local_batch} and Accelerator(gradient_accumulation_steps="
        f"{setup.plan.schedule.micro_batches}) are the training's"
    )
    if setup.degree("tensor") > 1:
        yield (
            "a model is split as it was loaded: from_pretrained(distributed_config=...) of convert "
            "--to transformers, on as many ranks as tp_size"
        )
    if setup.zero == 2:
        yield "gradients are added up whole and reduced once a step (ZeRO 1)"
    if setup.recompute != "none" and setup.shards == 1:
        yield f"recompute ({setup.recompute}) is left to torch.utils.checkpoint"
    elif setup.recompute in PARTLY:
        yield "whole layers are recomputed; the plan recomputes a part"
