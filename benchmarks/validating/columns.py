"""The columns of files of published measurements: those that are used, and why others are not.

A column that is in neither list is told as one that is not read, so that nothing that a source says
is passed over in silence. Those of training steps are in `facts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .facts import MEASURED
from .facts import NOT_USED as OF_STEPS
from .facts import USED as IN_STEPS

USED: Mapping[str, str] = {
    "golden": """
        family case gpu gpus gpus_inferred tp pp vp cp ep etp layers hidden heads kv_heads
        head_dim ffn gated vocab vocab_padded seq experts topk moe_ffn shared_expert_ffn
        moe_layer_freq moe_dispatcher micro_batch global_batch precision seq_parallel recompute
        dist_optimizer overlap_grad_reduce overlap_param_gather tp_comm_overlap untie attention
        pp_layout nccl_nvls deterministic iter_time_s mem_max_allocated_bytes trap
    """,
    "experts": """
        case gpu ep seq micro_batch hidden moe_ffn experts topk shared_expert_ffn router
        dispatcher precision forward_s backward_s
    """,
    "simumax": """
        case layers hidden heads kv_heads ffn vocab experts topk moe_ffn shared_ffn dense_layers
        attention gated seq tp pp cp cp_comm ep dp vp micro_batch global_batch
        dist_optimizer ce_fusion real_step_s real_alloc_gib_max_rank pred_step_s
    """,
    "mist": """
        family model layers hidden heads kv_heads ffn gated vocab seq gpu gpus global_batch
        layer_partitions recomputed_layers_per_stage stage_strategies flash_attn step_s
        stage_peak_allocated_MB
    """,
    "aceso": """
        gpu system model layers hidden heads seq gpus micro_batch global_batch stages step_s
        pred_step_s run
    """,
    "stages": """
        gpu system model run stage fwd_ms bwd_ms max_allocated_MB
    """,
    "sailor": """
        cluster model layers hidden heads seq vocab gpu_types heterogeneous gpus tp stages
        micro_batch global_batch step_s peak_mem_bytes trap
    """,
    "sailor layers": """
        model hidden heads kv_heads ffn seq gpu micro_batch tp layer_fwd_s layer_bwd_s
    """,
    "layers": """
        what gpu setting forward_ms backward_ms combined_ms
    """,
    "collectives": """
        collective machine gpus nodes size_bytes busbw_GBps algbw_GBps time_us tool kind notes
    """,
    "memory": """
        kind model params_b config gpu component value unit
    """,
    "grid": """
        gpus global_batch micro_batch hidden heads layers seq_len tp dp pp step_time_s
    """,
}
"""Columns that a price follows from, or that it is compared with, by the kind of file."""
NOT_USED: Mapping[str, Mapping[str, str]] = {
    "golden": {
        "says how the row was read": """
            gpus_source gpus_inferred_fit vocab_source iter_p10_s iter_p90_s
            timed_points points_used log_interval mem_rank train_iters
        """,
        "a name": "environment platform source",
        "the fuller of two figures is compared": "mem_allocated_bytes",
        "follows from the sizes": "model_flops_step mfu",
        "the batch of the steps is stated": "batch_rampup",
        "one value in all rows": "transformer_impl sharding",
        "follows from the devices": "dp",
        "the ring is what is priced without NVLS": "nccl_algo",
    },
    "experts": {
        "follows from the ranks": "gpus",
        "one value in all rows": "tp",
        "a name": "source",
        "even in all rows": "routing",
        "a peak of one layer, with what the test holds": "max_allocated_bytes",
    },
    "simumax": {
        "one value in all rows": "gpu gpus recompute precision seq_parallel overlap",
        "its sizes are stated": "model",
        "follows from the others": "nodes microbatches",
        "says how the row was read": "real_definition memory_from_case trap",
        "the fullest rank is compared": "real_alloc_first_stage_gib real_alloc_last_stage_gib",
        "what is allocated is compared": "real_reserved_gib_max_rank",
        "the source's own prediction of memory": "pred_alloc_gib pred_reserved_gib",
        "the error of the source's own prediction": "pred_time_err_pct pred_alloc_err_pct",
        "follows from the step": "mfu_2250",
    },
    "mist": {
        "follows from the others": "grad_accum device_assignment_dp_tp",
        "one value in all rows": "precision",
        "what is allocated is compared": "stage_peak_reserved_MB",
        "a name": "source",
    },
    "aceso": {
        "follows from the stages": "pp",
        "one value in all rows": "precision",
        "says how the row was read": "timed_iterations attempts csv_time_s trap",
        "rows without a time are left out": "out_of_memory",
        "the source's own prediction of memory": "pred_max_stage_mem_MB",
        "a name": "source_dir",
    },
    "stages": {
        "all ranks of a stage are averaged": "rank",
        "both passes are compared": """
            step_ms fwd_recv_ms fwd_send_ms fwd_send_bwd_recv_ms bwd_recv_ms bwd_send_ms
            bwd_send_fwd_recv_ms params_all_reduce_ms embedding_all_reduce_ms
            optimizer_ms batch_generator_ms
        """,
        "the peak of what is allocated is compared": "allocated_MB reserved_MB max_reserved_MB",
    },
    "sailor": {
        "follows from the stages": "nodes pp dp",
        "one value in all rows": "precision zero_stage",
        "part of the step": "grad_reduce_s",
        "says how the row was read": "mem_definition",
        "a name": "source",
    },
    "sailor layers": {
        "layers are compared, not the ends or updates": """
            layer_update_s embed_fwd_s embed_bwd_s embed_update_s head_fwd_s head_bwd_s
            head_update_s
        """,
        "says how the row was read": "entries trap",
    },
    "layers": {
        "says how the row was read": "source seen notes",
        "seconds are compared": "mem_bytes",
    },
    "collectives": {"says how the row was read": "source seen"},
    "memory": {"says how the row was read": "source seen notes"},
}
"""Other columns, by the reason."""


def unnamed(kind: str, columns: frozenset[str]) -> list[str]:
    """The columns of a file of some kind that are neither used nor named as not used."""
    if kind == "steps":
        return sorted(columns - {*IN_STEPS, *MEASURED, *OF_STEPS})
    others = " ".join(NOT_USED.get(kind, {}).values())
    return sorted(columns - {*USED[kind].split(), *others.split()})
