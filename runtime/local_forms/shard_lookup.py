"""Look-ups in a table with split rows: rows of other shards read as zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.ir import Ref, Value
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import Knowledge, register


def shard_index(indices: Tensor, size: int, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """Places of global rows in this rank's shard, and whether each row is in it.

    A row of another shard has place 0. Several cuts of one dim are applied from the outermost on.
    """
    local = indices
    inside = torch.ones_like(indices, dtype=torch.bool)
    for _, parts, degree, coordinate in cuts:
        # A dim cut within each of `parts` parts: the rank has the same chunk of every part.
        chunk = size // (parts * degree)
        within = local % (degree * chunk)
        inside = inside & (within // chunk == coordinate)
        local = local // (degree * chunk) * chunk + within % chunk
        size //= degree
    return torch.where(inside, local, 0), inside


def wrapped_shard_index(indices: Tensor, size: int, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """As `shard_index`; negative places count from the end of the whole dim."""
    return shard_index(torch.where(indices < 0, indices + size, indices).long(), size, cuts)


def padding_row(row: int, size: int, cuts: Cuts) -> int:
    """The padding row inside this rank's shard, or -1 (none)."""
    local, inside = shard_index(torch.tensor(row), size, cuts)
    return int(local) if bool(inside) else -1


def embedding(
    weight: Tensor,
    indices: Tensor,
    rows: int,
    cuts: Cuts,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up the rows that this rank holds.

    The others give zeros, so that the ranks' results add up.
    """
    local, inside = shard_index(indices, rows, cuts)
    out = torch.ops.aten.embedding.default(weight, local, padding_idx, scale_grad_by_freq, sparse)
    return torch.where(inside.unsqueeze(-1), out, 0.0)


def _masked_rows(table: str, indices: str, padding: str | None) -> Knowledge:
    """The change of a look-up in a table with split rows."""

    def change(call: LocalCall) -> Mapping[str, Value] | None:
        attributes = call.operator.attributes
        weight = attributes[table]
        assert isinstance(weight, Ref) and isinstance(attributes[indices], Ref)
        cuts = tuple(cut for cut in call.cuts(call.decision.inputs[weight.index]) if cut.dim == 0)
        if not cuts:
            return None
        rows = call.inputs[weight.index].shape[0]
        changes: dict[str, Value] = {"rows": rows, "cuts": tuple(tuple(cut) for cut in cuts)}
        # The padding row gets no gradient, on the rank that holds it.
        row = attributes.get(padding, -1) if padding else -1
        if isinstance(row, int) and row >= 0:
            changes["padding_idx"] = padding_row(row, rows, cuts)
        return changes

    return change


register(
    "aten.embedding.default",
    knows=_masked_rows("weight", "indices", "padding_idx"),
    local=embedding,
)
