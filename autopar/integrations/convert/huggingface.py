"""The tensor-parallel plan of Hugging Face transformers (`tp_plan`), also read by other projects.

It names a style for each module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from .linears import Split, Style, splits_of
from .reach import REPLICAS, Reach, lacks
from .setup import Converted, Setup
from .splittable import BY_STYLE

TARGET = "hf-tp-plan"
REACH = (Reach(axes=(*REPLICAS, "tensor"), needed=("tensor",), infers=True, weights=BY_STYLE),)
PACKED = 2
"""Parts of the fused projections that a packed style splits."""


def tensor_plan(setup: Setup) -> Converted:
    """The dict as JSON."""
    setup.refuse(TARGET, *_lacks(setup))
    splits = splits_of(setup, TARGET)
    setup.refuse(TARGET, *splits_lack(splits))
    text = json.dumps({name: style_of(split) for name, split in splits.items()}, indent=1)
    return Converted(text=text + "\n", lost=tuple(_losses(setup)))


def _lacks(setup: Setup) -> Iterable[str]:
    """Parts of a plan that are no styles of modules."""
    yield from setup.mixed(share=1)
    yield from lacks(REACH, setup)


def splits_lack(splits: Mapping[str, Split]) -> Iterable[str]:
    """Complaints about splits of modules for which there is no style."""
    for name, split in splits.items():
        if split.style == "embedding columns" and split.leaves == "features":
            yield f"columns of {name} that stay split behind it"
    odd = [
        f"{name} in {split.parts} parts"
        for name, split in splits.items()
        if split.parts not in (1, PACKED)
    ]
    if odd:
        yield (
            f"fused projections split in each of more than {PACKED} parts ({', '.join(odd[:5])})"
        )


def _losses(setup: Setup) -> Iterable[str]:
    """Sentences on parts of a plan that are set elsewhere."""
    yield from setup.lost
    if setup.degree("data") > 1:
        yield f"data parallelism over {setup.degree('data')} devices is set beside the plan"
    if setup.zero:
        yield f"ZeRO {setup.zero} is set beside the plan"
    micro_batches = setup.plan.schedule.micro_batches
    if micro_batches > 1:
        yield f"gradient accumulation over {micro_batches} micro-batches is set beside the plan"


def style_of(split: Split) -> str:
    """The name of a style."""
    if split.style in ("column", "row") and split.parts == PACKED:
        return f"packed_{_STYLES[split.style]}"
    if split.style == "column" and split.leaves != "features":
        return "colwise_gather_output"
    if split.style == "row" and split.comes != "features":
        return "rowwise_split_input"
    if split.style == "norm" and split.dim != 1:
        return "replicated_with_grad_allreduce"
    return _STYLES[split.style]


_STYLES: Mapping[Style, str] = {
    "column": "colwise",
    "row": "rowwise",
    "embedding rows": "embedding_rowwise",
    "embedding columns": "embedding_colwise",
    "norm": "sequence_parallel",
}
"""The style of a module whose values come and leave as the neighbouring modules need them."""
