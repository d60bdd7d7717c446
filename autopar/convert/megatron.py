"""The parallelism arguments of Megatron-LM's training scripts, one a line."""

from __future__ import annotations

from .setup import Converted, Setup

TARGET = "megatron"
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
SCHEDULES = ("1f1b", "interleaved")
WITH_FSDP2 = ("--no-gradient-accumulation-fusion", "--ckpt-format torch_dist")
"""Further arguments that its parser demands with FSDP2, as of Megatron-LM d98e8a64dd."""
TYPES = {"bfloat16": "--bf16", "float16": "--fp16"}


def megatron(setup: Setup) -> Converted:
    """The arguments."""
    plan, schedule = setup.plan, setup.plan.schedule
    setup.refuse(
        TARGET,
        *setup.mixed(),
        "inference" if plan.model.mode == "infer" else "",
        setup.pipeline_beyond(SCHEDULES),
        setup.split_beyond(),
        setup.optimizer_beyond(OPTIMIZERS),
        "parameters gathered again for every pass (ZeRO 3) beside pipeline stages" if setup.zero == 3 and setup.stages > 1 else "",
        "parameters gathered again for every pass (ZeRO 3) beside split weights" if setup.zero == 3 and setup.degree("tensor") > 1 else "",
    )
    lost = [*setup.lost, *setup.minor()]
    found: list[tuple[str, object]] = [
        ("--tensor-model-parallel-size", setup.degree("tensor")),
        ("--pipeline-model-parallel-size", setup.stages),
        ("--context-parallel-size", setup.degree("sequence")),
        ("--expert-model-parallel-size", setup.degree("expert")),
        ("--micro-batch-size", setup.local_batch),
        ("--global-batch-size", setup.batch),
        ("--optimizer", OPTIMIZERS[plan.model.optimizer]),
    ]
    found += [("--seq-length", setup.sequence)] if setup.sequence else []
    found += [("--num-virtual-stages-per-pipeline-rank", schedule.interleave)] if schedule.interleave > 1 else []
    flags = ["--sequence-parallel"] if setup.sequence_parallel else []
    if setup.zero == 3:
        flags += ["--use-torch-fsdp2", *WITH_FSDP2]
        lost.append("its FSDP2 is for models whose output weights are not the embedding's (--untie-embeddings-and-output-weights)")
    elif setup.zero:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if setup.zero == 2:
        lost.append("gradients are reduced once a step (ZeRO 1), not at every micro-batch (ZeRO 2)")
    if setup.recompute == "full":
        found += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
    elif setup.recompute == "selective":
        flags.append("--recompute-activations")
        lost.append("its selective recompute makes the attention again, not what the plan names")
    types = {p.dtype for p in plan.parameters.values()} & set(TYPES)
    flags += [TYPES[types.pop()]] if len(types) == 1 else []
    lines = [*(f"# {note}" for note in lost), *(f"{name} {value}" for name, value in found), *flags]
    return Converted(text="\n".join(lines) + "\n", lost=tuple(lost))
