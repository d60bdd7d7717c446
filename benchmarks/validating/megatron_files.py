"""Runs of Megatron-Core in files of their own.

Its tests' golden values, SimuMax's runs on B200, layers of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import Framework, framework_named
from autopar.integrations.importing.pipeline_layout import chunks_of
from benchmarks.validating.known.shape import Latent, Shape

from .configuration import Configuration
from .facts import precision_of
from .machines import cluster_of, without_features
from .missing import Missing
from .prepared import MANY, Prepared
from .priced import price
from .scores import Sample
from .sizes import Row, number
from .steps import DISPATCHERS

CORE = framework_named("megatron-core")
LATENT = Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
"""DeepSeek's latent attention, of which these files name no other."""
BACKENDS: Mapping[str, str] = {"unfused": "fused", "flash": "flash2", "fused": "cudnn"}
"""Attention by the names of Transformer Engine: `unfused` has scale, mask and softmax in a kernel,
`fused` is cuDNN's (pytorch/attention).
"""
DEEP = ("mislabelled", "not comparable", "copy", "unstable")
"""Words of a trap that make a row's time worthless."""


def _flag(row: Row, name: str) -> bool:
    return row[name] in ("1", "1.0", "True", "true")


def _dispatcher(word: str) -> str:
    """The dispatcher of a row: `flex/deepep` and `deepep` are one."""
    return DISPATCHERS.get(word.rpartition("/")[2], "alltoall")


# --- Megatron-LM's own tests ---


def golden_group(row: Row) -> str:
    """The group of a row.

    Deterministic runs, and those whose number of devices is open, are scored apart.
    """
    if _flag(row, "deterministic"):
        return "megatron_golden deterministic"
    return "megatron_golden" + (" ambiguous" if "ambiguous" in row["trap"] else "")


def golden(row: Row) -> Prepared:
    """A row of Megatron-LM's golden values, of a full-size model.

    The number of devices is known, or inferred from the memory.
    """
    if "tiny model" in row["trap"]:
        raise Missing("a tiny model: launches alone")
    if any(word in row["trap"] for word in DEEP):
        raise Missing(f"a trap: {row['trap']}")
    devices = number(row, "gpus", 0) or number(row, "gpus_inferred", 0)
    if not devices or not row["layers"] or not row["vocab"]:
        raise Missing("not given: gpus, layers or vocab")
    tensor, pipeline, context = (number(row, name) for name in ("tp", "pp", "cp"))
    work = _golden_framework(row)
    layout = chunks_of(row["pp_layout"]) if row["pp_layout"] else ()
    c = Configuration(
        global_batch=number(row, "global_batch"),
        micro_batch=number(row, "micro_batch"),
        tensor=tensor,
        pipeline=pipeline,
        data=devices // (tensor * pipeline * context),
        context=context,
        expert=number(row, "ep"),
        expert_tensor=number(row, "etp", 0),
        dispatcher=_dispatcher(row["moe_dispatcher"]),
        interleave=len(layout) // pipeline if layout else number(row, "vp"),
        layout=layout,
        zero=int(_flag(row, "dist_optimizer")),
        sequence_parallel=_flag(row, "seq_parallel"),
        recompute=_golden_recompute(row),
    )
    measured = float(row["iter_time_s"]) if row["iter_time_s"] else None
    return Prepared(
        label=f"{row['case']} on {devices} {row['gpu']}",
        shape=_golden_shape(row),
        configuration=c.run_by(work),
        framework=work.name,
        cluster=_golden_cluster(row),
        measured=measured,
        stage=-1,
        deterministic=_flag(row, "deterministic"),
        memory=float(row["mem_max_allocated_bytes"]) if row["mem_max_allocated_bytes"] else None,
    )


def _golden_shape(row: Row) -> Shape:
    hidden = number(row, "hidden")
    heads = number(row, "heads")
    latent = "MLA" in row["trap"]
    encoder = row["family"] == "t5"
    freq = row["moe_layer_freq"]
    return Shape(
        layers=number(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else number(row, "kv_heads", heads),
        head_size=0 if latent else number(row, "head_dim", 0),
        ffn=number(row, "ffn", 4 * hidden),
        vocab=number(row, "vocab_padded", number(row, "vocab")),
        sequence=128 if encoder else number(row, "seq"),
        gated=_flag(row, "gated"),
        latent=LATENT if latent else None,
        experts=number(row, "experts", 0),
        top_k=number(row, "topk", 2),
        expert_ffn=number(row, "moe_ffn", 0),
        shared_ffn=number(row, "shared_expert_ffn", 0),
        dense_layers=int(freq.partition("[0]*")[2].partition("+")[0] or 0)
        if freq.startswith("([0]*")
        else 0,
        # T5's decoder of 128 tokens attends to an encoder of as many layers
        # (tests/functional_tests/test_cases/t5).
        encoder_layers=number(row, "layers") if encoder else 0,
        encoder_sequence=number(row, "seq") if encoder else 0,
        mtp="".join(chunks_of(row["pp_layout"])).count("m"),
        tied=not _flag(row, "untie"),
        bias=encoder,
        dropout=False,
        norm="layer_norm",
        position="learned" if encoder else "rotary",
    )


def _golden_framework(row: Row) -> Framework:
    habits = replace(
        CORE.habits,
        overlap_gradients=_flag(row, "overlap_grad_reduce"),
        overlap_gather=_flag(row, "overlap_param_gather"),
        pipelined_tensor=_flag(row, "tp_comm_overlap"),
    )
    if _flag(row, "deterministic"):
        # Sums of gradients are passes of their own, and norms of parameters and gradients and their
        # zeros are logged (model_config.yaml of these cases).
        habits = replace(
            habits, fused_accumulation=False, update_traffic=CORE.habits.update_traffic + 18.0
        )
    narrow = ""
    if "mxfp8" in row["precision"]:
        narrow = "float8_block"
    elif "fp8" in row["precision"]:
        narrow = "float8_e4m3fn"
    attention = row["attention"]
    if attention and attention not in BACKENDS:
        raise Missing(f"attention not described: {attention}")
    kernels = replace(
        CORE.kernels,
        products=narrow,
        attention=BACKENDS.get(attention, CORE.kernels.attention),
        skips_masked=attention == "unfused",
    )
    return replace(CORE, habits=habits, kernels=kernels)


def _golden_cluster(row: Row) -> Cluster:
    """The machines of a row, whose switches add nothing up where NVLS is off."""
    cluster = cluster_of(row["gpu"])
    return without_features(cluster) if row["nccl_nvls"].startswith("0") else cluster


def _golden_recompute(row: Row) -> str:
    if not row["recompute"]:
        return "none"
    return "full" if "full" in row["recompute"] else "selective"


# --- SimuMax on one B200 node ---


def simumax(row: Row) -> Prepared:
    """A row of SimuMax's runs.

    No overlap of any kind, a fused loss, Megatron-Core with Transformer Engine.
    """
    latent = row["attention"].startswith("mla")
    heads = number(row, "heads")
    tensor = number(row, "tp")
    shape = Shape(
        layers=number(row, "layers"),
        hidden=number(row, "hidden"),
        heads=heads,
        kv_heads=heads if latent else number(row, "kv_heads", heads),
        ffn=number(row, "ffn"),
        vocab=number(row, "vocab"),
        sequence=number(row, "seq"),
        gated=_flag(row, "gated"),
        latent=LATENT if latent else None,
        experts=number(row, "experts", 0),
        top_k=number(row, "topk", 2),
        expert_ffn=number(row, "moe_ffn", 0),
        shared_ffn=number(row, "shared_ffn", 0),
        dense_layers=number(row, "dense_layers", 0),
        tied=False,
        bias=False,
        dropout=False,
        norm="rms_norm",
        position="rotary",
    )
    loss = "megatron-fused" if _flag(row, "ce_fusion") else "megatron"
    c = Configuration(
        global_batch=number(row, "global_batch"),
        micro_batch=number(row, "micro_batch"),
        tensor=tensor,
        pipeline=number(row, "pp"),
        data=number(row, "dp"),
        context=number(row, "cp"),
        context_by="heads" if row["cp_comm"] == "a2a" else "ring",
        expert=number(row, "ep"),
        interleave=number(row, "vp"),
        zero=int(_flag(row, "dist_optimizer")),
        sequence_parallel=tensor > 1,
    )
    work = CORE.but(loss=loss)
    return Prepared(
        label=row["case"],
        shape=shape,
        configuration=c.run_by(work),
        framework=work.name,
        cluster=cluster_of("B200", source="simumax"),
        measured=float(row["real_step_s"]),
        memory=float(row["real_alloc_gib_max_rank"]) * 2**30
        if row["real_alloc_gib_max_rank"]
        else None,
        peer=float(row["pred_step_s"]) if row["pred_step_s"] else None,
    )


# --- single layers of experts ---


def experts_layer(row: Row) -> list[tuple[str, Sample]]:
    """Passes of a layer of experts.

    A model with it minus one without, as the rows have no attention.
    """
    ranks = number(row, "ep")
    shape = Shape(
        layers=1,
        hidden=number(row, "hidden"),
        heads=number(row, "hidden") // 128,
        kv_heads=number(row, "hidden") // 128,
        ffn=number(row, "moe_ffn"),
        vocab=1024,
        sequence=number(row, "seq"),
        gated=True,
        experts=number(row, "experts"),
        top_k=number(row, "topk"),
        expert_ffn=number(row, "moe_ffn"),
        shared_ffn=number(row, "shared_expert_ffn", 0),
        groups=8 if row["router"].startswith("groups 8") else 0,
        top_groups=4 if "group top-4" in row["router"] else 0,
        tied=False,
        bias=False,
        dropout=False,
        norm="rms_norm",
        position="none",
    )
    narrow = precision_of(row)[1]
    if narrow and "blockwise" in row["precision"]:
        narrow = "float8_block"
    micro = number(row, "micro_batch")
    c = Configuration(
        global_batch=MANY * micro * ranks,
        micro_batch=micro,
        data=ranks,
        expert=ranks,
        dispatcher=_dispatcher(row["dispatcher"]),
        zero=1,
    )
    work = replace(CORE, kernels=replace(CORE.kernels, products=narrow))
    cluster = cluster_of(row["gpu"])
    dense = replace(shape, experts=0, shared_ffn=0, ffn=1)
    with_experts, without = (
        price(s, own.run_by(work), cluster, work.name)
        for s, own in ((shape, c), (dense, replace(c, expert=1)))
    )
    samples = []
    for name in ("forward", "backward"):
        there, apart = (getattr(one, name)[0] for one in (with_experts, without))
        samples.append(
            (
                name,
                Sample(
                    label=f"{row['case']}, {name}",
                    measured=float(row[f"{name}_s"]),
                    predicted=there - apart,
                ),
            )
        )
    return samples
