"""The tensor-parallel plan of Hugging Face transformers (`tp_plan`), also read by other projects: styles by module."""

from __future__ import annotations

import json

from .linears import Split, splits_of
from .setup import Converted, Setup

TARGET = "hf-tp-plan"
PACKED = 2
"""Parts of the fused projections that a packed style splits."""


def tensor_plan(setup: Setup) -> Converted:
    """The dict as JSON."""
    setup.refuse(
        TARGET,
        *setup.mixed(share=1),
        setup.staged(),
        setup.lacking("sequence", "splitting the sequence of attention"),
        setup.lacking("expert", "splitting experts"),
        "sequence parallelism between tensor-parallel layers" if setup.sequence_parallel else "",
    )
    splits = splits_of(setup, TARGET)
    setup.refuse(TARGET, "" if splits else "a plan that splits no weights: it only says how weights are split")
    odd = [f"{name} in {split.parts} parts" for name, split in splits.items() if split.parts not in (1, PACKED)]
    setup.refuse(TARGET, f"fused projections split in each of more than {PACKED} parts ({', '.join(odd[:5])})" if odd else "")
    lost = [*setup.lost]
    lost += [f"data parallelism over {setup.degree('data')} devices is set beside the plan"] if setup.degree("data") > 1 else []
    lost += [f"ZeRO {setup.zero} is set beside the plan"] if setup.zero else []
    if setup.plan.schedule.micro_batches > 1:
        lost.append(f"gradient accumulation over {setup.plan.schedule.micro_batches} micro-batches is set beside the plan")
    text = json.dumps({name: style_of(split) for name, split in splits.items()}, indent=1)
    return Converted(text=text + "\n", lost=tuple(lost))


def style_of(split: Split) -> str:
    """The name of a style."""
    packed = "packed_" if split.parts == PACKED else ""
    match split.style:
        case "column":
            return f"{packed}colwise" if split.leaves == "features" or packed else "colwise_gather_output"
        case "row":
            return f"{packed}rowwise" if split.comes == "features" or packed else "rowwise_split_input"
        case "embedding rows":
            return "embedding_rowwise"
        case "embedding columns":
            return "embedding_colwise"
        case "norm":
            return "sequence_parallel" if split.dim == 1 else "replicated_with_grad_allreduce"
