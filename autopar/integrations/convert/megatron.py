"""The parallelism arguments of Megatron-LM's training scripts, one a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.order import schedules

from .precisions import words_of
from .reach import FOLDED, PARTLY, REPLICAS, WEIGHTS, Reach, lacks
from .setup import UNMERGED, Converted, Setup
from .stage_layers import StageLayers, stage_layers

TARGET = "megatron"
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
MUON = "muon"
LAYER_WISE = "dist_muon"
"""Its Muon, and the form that shares states out by parameter, without its distributed optimizer."""
LOSSES = {"in-place": "te", "megatron-fused": "native"}
"""Its implementations of a fused cross entropy, by ours."""
SCHEDULES = tuple(row.name for row in schedules.SCHEDULES.values() if row.other_names.megatron)
WITH_FSDP2 = ("--no-gradient-accumulation-fusion", "--ckpt-format torch_dist")
"""Further arguments that its parser demands with FSDP2, as of Megatron-LM d98e8a64dd."""
TYPES = {"bfloat16": "--bf16", "float16": "--fp16"}
GRADIENTS = {
    "bfloat16": ("--grad-reduce-in-bf16", "bfloat16"),
    "float16": ("--accumulate-allreduce-grads-in-fp32", "float32"),
}
"""By type of the computation: what has gradients travel in another type than is usual there."""
REACH = (
    Reach(
        axes=(*REPLICAS, *WEIGHTS, *FOLDED, "expert", "context", "ulysses"),
        zeros=(0, 1),
        # The distributed optimizer is the nearest to ZeRO 2.
        near=(2, *PARTLY),
        stages=(1, 0),
        schedules=SCHEDULES,
        # It merges passes of several chunks a stage alone, which no search is told.
        searched=tuple(name for name in SCHEDULES if not schedules.SCHEDULES[name].merges),
        optimizers=(*OPTIMIZERS, MUON),
        merges=True,
    ),
    # Its FSDP2 knows data parallelism alone, without replicas of the shards.
    Reach(axes=("shard",), zeros=(3,), optimizers=tuple(OPTIMIZERS)),
)


def megatron(setup: Setup) -> Converted:
    """The arguments of a plan."""
    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup), _merged_beyond(setup))
    # Its combined 1F1B merges passes.
    said = [note for note in setup.lost if note != UNMERGED]
    lost = [*said, *setup.minor(), *losses(setup)]
    if setup.zero == 3:
        lost.append(
            "its FSDP2 is for models whose output weights are not the embedding's "
            "(--untie-embeddings-and-output-weights)"
        )
    lines = [f"# {note}" for note in lost]
    lines += [f"{name} {value}".rstrip() for name, value in _options(setup).items()]
    lines += _flags(setup)
    return Converted(text="\n".join(lines) + "\n", lost=tuple(lost))


def _merged_beyond(setup: Setup) -> str:
    schedule = setup.plan.schedule
    if schedule.overlap_experts and setup.stages > 1 and schedule.interleave == 1:
        return "merged passes of stages that hold one chunk each"
    return ""


def losses(setup: Setup) -> Iterable[str]:
    """Sentences on parts of a plan that become something else."""
    # The distributed optimizer is the nearest to ZeRO 2: it splits the optimizer's state, and keeps
    # whole gradients until the last micro-batch.
    if setup.zero == 2:
        yield (
            "gradients are reduced once a step (ZeRO 1), not at every micro-batch (ZeRO 2): "
            f"{setup.gathered(setup.gradient_type)}"
        )
    yield from setup.widened()
    if (layout := stage_layers(setup.plan)) is not None:
        yield from layout.moved()
    elif setup.stages > 1:
        yield "layers are cut into stages of equal numbers: the plan's names do not number them"
    if setup.recompute in ("selective", "alternate"):
        yield "its selective recompute makes the attention again, not what the plan names"


def _options(setup: Setup) -> Mapping[str, object]:
    """The arguments that have a value."""
    schedule = setup.plan.schedule
    options: dict[str, object] = {
        "--tensor-model-parallel-size": setup.degree("tensor"),
        "--pipeline-model-parallel-size": setup.stages,
        "--context-parallel-size": setup.degree("sequence", "ulysses"),
        "--expert-model-parallel-size": setup.experts,
        "--micro-batch-size": setup.local_batch,
        "--global-batch-size": setup.batch,
        "--optimizer": _optimizer(setup),
    }
    if setup.sequence:
        options["--seq-length"] = setup.sequence
    if setup.has_experts:
        # Its defaults are gathers of all rows on each rank, and a product for each expert.
        options["--expert-tensor-parallel-size"] = setup.inside_experts
    options |= {f"--{name}": value for name, value in habits(setup, TARGET).items()}
    if setup.degree("ulysses") > 1:
        options["--cp-comm-type"] = "a2a"
    replicas = setup.degree("data") // setup.shards
    if setup.zero in (1, 2) and replicas > 1:
        options["--num-distributed-optimizer-instances"] = replicas
    layout = stage_layers(setup.plan)
    if layout is not None and not layout.even:
        options["--pipeline-model-parallel-layout"] = f'"{letters(layout)}"'
    elif schedule.interleave > 1:
        options["--num-virtual-stages-per-pipeline-rank"] = schedule.interleave
    if setup.recompute == "full":
        # "uniform" in units of one layer computes every layer again by itself.
        options["--recompute-granularity"] = "full"
        options["--recompute-method"] = "uniform"
        options["--recompute-num-layers"] = 1
    if (words := words_of(setup.plan)) is not None:
        options |= {f"--{name}": value for name, value in words.megatron.items()}
    return options


def habits(setup: Setup, target: str) -> Mapping[str, object]:
    """The arguments, or fields, of what the price of a plan takes of its framework."""
    framework = setup.framework(target)
    options: dict[str, object] = {}
    if setup.has_experts:
        dispatcher = framework.kernels.dispatcher or "alltoall"
        options["moe-token-dispatcher-type"] = "flex" if dispatcher == "node" else dispatcher
        if dispatcher == "node":
            options["moe-flex-dispatcher-backend"] = "deepep"
    if framework.habits.loss in LOSSES:
        options["cross-entropy-loss-fusion"] = ""
        options["cross-entropy-fusion-impl"] = LOSSES[framework.habits.loss]
    if framework.habits.pipelined_tensor and setup.sequence_parallel:
        options["tp-comm-overlap"] = ""
    if framework.habits.graphed:
        options["cuda-graph-impl"] = "transformer_engine"
        options["cuda-graph-scope"] = "attn moe_router"
    return options


def _optimizer(setup: Setup) -> str:
    name = setup.plan.model.optimizer
    if name == MUON:
        return LAYER_WISE if setup.zero else MUON
    return OPTIMIZERS[name]


def letters(layout: StageLayers) -> str:
    """The layout of stages in its letters: embedding, transformer layers, loss."""
    parts = [f"t*{len(layers)}" for layers in layout.chunks]
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])


def _sharding(setup: Setup) -> Iterable[str]:
    """How states, or parameters, are shared out, and what runs under the passes."""
    if setup.zero == 3:
        yield "--use-torch-fsdp2"
        yield from WITH_FSDP2
        return
    if setup.zero and setup.plan.model.optimizer != MUON:
        yield "--use-distributed-optimizer"
        yield "--overlap-param-gather"
    if setup.zero or setup.degree("data", "expert", "sequence", "ulysses") > 1:
        yield "--overlap-grad-reduce"


def _flags(setup: Setup) -> Iterable[str]:
    if setup.sequence_parallel:
        yield "--sequence-parallel"
    yield from _sharding(setup)
    words = words_of(setup.plan)
    if setup.zero and words is not None and words.gather:
        yield f"--{words.gather}"
    if setup.has_experts:
        yield "--moe-grouped-gemm"
    if setup.plan.schedule.overlap_experts:
        yield "--overlap-moe-expert-parallel-comm"
    if setup.recompute in PARTLY:
        yield "--recompute-activations"
    if dtype := setup.parameter_type(TYPES):
        yield TYPES[dtype]
        flag, wanted = GRADIENTS[dtype]
        if setup.gradient_type == wanted:
            yield flag
