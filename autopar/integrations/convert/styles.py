"""The styles of Hugging Face transformers for modules whose weights are split (`tp_plan`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .linears import Split, Style

PACKED = 2
"""Parts of the fused projections that a packed style splits."""


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
