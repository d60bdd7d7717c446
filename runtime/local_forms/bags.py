"""Bags of rows of an embedding: a rank makes its own bags, and chooses their indices among all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.cuts import Cut, shard_of


def _some_bags(
    kind: str,
    cuts: Cuts,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool = False,
    per_sample_weights: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, ...]:
    """This rank's bags, from all indices and offsets."""
    ends = offsets
    if not include_last_offset:
        ends = torch.cat([offsets, offsets.new_tensor([len(indices)])])
    own = shard_of(torch.arange(len(ends) - 1), [Cut(*cut) for cut in cuts])
    first = int(own[0])
    begin, end = ends[[first, first + len(own)]].tolist()
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights[begin:end]
    bags, of_index, *rest = function_of(kind)(
        weight=weight,
        indices=indices[begin:end],
        offsets=ends[first : first + len(own)] - begin,
        per_sample_weights=per_sample_weights,
        **arguments,
    )
    if len(of_index):
        numbers = torch.arange(len(ends) - 1, device=ends.device)
        of_index = numbers.repeat_interleave(ends.diff())
    return bags, of_index, *rest


def _own(call: LocalCall) -> Mapping[str, Value] | None:
    """This rank's part of the bags, where they are split."""
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]) if cut.dim == 0)
    return {"cuts": cuts} if cuts else None


_KINDS = "embedding_bag.default embedding_bag.padding_idx _embedding_bag.default"
for _kind in f"{_KINDS} _embedding_bag_forward_only.default".split():
    register(f"aten.{_kind}", knows=_own, local=functools.partial(_some_bags, f"aten.{_kind}"))
