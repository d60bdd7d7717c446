"""The exchange of whole matrices: shards go to their owners, and updates come back.

`autopar/order/owners.py` says who owns which matrix, and what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.order.owners import Exchange, Owned, Owners, copy_of, shard_of_place
from autopar.runtime.ranks.collectives import gather_rows, swap_rows
from autopar.runtime.ranks.cuts import Cut, cuts_of, deal, join
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import Layout, Placement, R
from autopar.sharding.mesh import Axes, degree_of

SENT = torch.bfloat16
Update = Callable[[Tensor], Tensor]
"""From a whole matrix to its update, of the same shape."""
Item = tuple[str, int]
"""A parameter, and the number of one of its matrices on this rank."""


def updates_of(
    owners: Owners,
    groups: DeviceGroups,
    layouts: Mapping[str, Layout],
    shards: Mapping[str, Tensor],
    update: Update,
) -> dict[str, Tensor]:
    """The updates of this rank's shards of matrices, from the shards of what they are made of.

    Collective: all ranks of the mesh call it with equal owners.
    """
    parts = [
        _Part(exchange, groups, layouts, {o.name: shards[o.name] for o in exchange.members})
        for exchange in owners.exchanges
    ]
    # All that comes to this rank comes before it computes: ranks then issue their collectives in
    # one order, however long the matrices of each take.
    wholes = [part.gathered() for part in parts]
    results: dict[str, Tensor] = {}
    for part, own in zip(parts, wholes, strict=True):
        made = {item: update(matrix) for item, matrix in own.items()}
        # Whole matrices are large, and are of no use any more.
        own.clear()
        results.update(part.returned(made))
    return results


class _Part:
    """One exchange on this rank."""

    def __init__(
        self,
        exchange: Exchange,
        groups: DeviceGroups,
        layouts: Mapping[str, Layout],
        shards: Mapping[str, Tensor],
    ) -> None:
        self.exchange = exchange
        self.groups = groups
        self.shards = shards
        self.mesh = groups.mesh.shape
        self.owned = {owned.name: owned for owned in exchange.members}
        self.layouts = {
            name: _of_matrix(layouts[name], exchange.split, shards[name].dim() - 2)
            for name in self.owned
        }
        self.row = self._place(exchange.split)
        self.copy = self._place(exchange.copied)

    def _place(self, axes: Axes) -> int:
        return self.groups.over(axes).coordinate if axes else 0

    def gathered(self) -> dict[Item, Tensor]:
        """The whole matrices that this rank owns."""
        # Copies are whole already; a rank updates those that it owns.
        if not self.exchange.split:
            return {item: self._shard(item) for item, row, _ in self._items() if row == self.row}
        outgoing = self._buffer(degree_of(self.exchange.split, self.mesh), self.exchange.sent)
        for item, row, start in self._items():
            shard = self._shard(item)
            outgoing[row, start : start + shard.numel()] = shard.flatten()
        incoming = swap_rows(outgoing, self.groups.over(self.exchange.split))
        own: dict[Item, Tensor] = {}
        for item, row, start in self._items():
            if row == self.row:
                shape = self._shard(item).shape
                pieces = incoming[:, start : start + shape.numel()]
                own[item] = _joined(pieces.reshape(-1, *shape), self._cuts(item[0]))
        return own

    def returned(self, made: Mapping[Item, Tensor]) -> dict[str, Tensor]:
        """The updates of all matrices' shards, from the whole ones of those that are owned."""
        parts = self._scattered(made) if self.exchange.split else made
        if self.exchange.copied:
            parts = self._shared(parts)
        results = {}
        for name, shard in self.shards.items():
            each = [parts[name, number].contiguous() for number in range(self._count(name))]
            results[name] = torch.stack(each) if shard.dim() > 2 else each[0]
        return results

    def _scattered(self, made: Mapping[Item, Tensor]) -> dict[Item, Tensor]:
        """The updates' shards of this copy's matrices, from their owners."""
        outgoing = self._buffer(degree_of(self.exchange.split, self.mesh), self.exchange.sent)
        for item, row, start in self._items():
            if row == self.row:
                dealt = _dealt(made[item].to(SENT), self._cuts(item[0])).flatten(1)
                outgoing[:, start : start + dealt.shape[1]] = dealt
        incoming = swap_rows(outgoing, self.groups.over(self.exchange.split))
        parts = {}
        for item, row, start in self._items():
            shape = self._shard(item).shape
            parts[item] = incoming[row, start : start + shape.numel()].view(shape)
        return parts

    def _shared(self, parts: Mapping[Item, Tensor]) -> dict[Item, Tensor]:
        """The updates' shards of all copies' matrices."""
        # Every rank lays out the rows of all copies, so that none has to tell another where its
        # updates begin.
        starts = Counter[int]()
        places: dict[Item, tuple[int, int]] = {}
        row = self._buffer(1, self.exchange.shared)[0]
        for item, place in self._every():
            copy = copy_of(self.owned[item[0]], place, self.mesh)
            size = self._shard(item).numel()
            start = starts[copy]
            places[item] = copy, start
            if copy == self.copy:
                row[start : start + size] = parts[item].flatten()
            starts[copy] += size
        rows = gather_rows(row, self.groups.over(self.exchange.copied))
        shared = {}
        for item, (copy, start) in places.items():
            shape = self._shard(item).shape
            shared[item] = rows[copy, start : start + shape.numel()].view(shape)
        return shared

    def _every(self) -> Iterator[tuple[Item, int]]:
        """Every matrix with the place of its owner."""
        for name, owned in self.owned.items():
            yield from (((name, number), place) for number, place in enumerate(owned.places))

    def _items(self) -> Iterator[tuple[Item, int, int]]:
        """This copy's matrices: the row of each one's owner, and its start in that row."""
        # Senders and owners count along the same list, which gives both the same places.
        starts = Counter[int]()
        for item, place in self._every():
            owned: Owned = self.owned[item[0]]
            if copy_of(owned, place, self.mesh) == self.copy:
                row = shard_of_place(owned, place, self.mesh)
                yield item, row, starts[row]
                starts[row] += self._shard(item).numel()

    def _shard(self, item: Item) -> Tensor:
        name, number = item
        shard = self.shards[name]
        return shard[number] if shard.dim() > 2 else shard

    def _count(self, name: str) -> int:
        return len(self.owned[name].places)

    def _cuts(self, name: str) -> tuple[Cut, ...]:
        return cuts_of(self.layouts[name], self.mesh, self.groups.coordinate)

    def _buffer(self, rows: int, columns: int) -> Tensor:
        # Zeros, as what is behind a shorter row is sent as well.
        any_shard = next(iter(self.shards.values()))
        return torch.zeros(rows, columns, dtype=SENT, device=any_shard.device)


def _of_matrix(layout: Layout, split: Axes, batched: int) -> Layout:
    """The layout of one matrix of a batch, of which axes outside `split` hold all."""
    return tuple(
        Placement(placement.kind, placement.dim - batched, placement.parts) if axis in split else R
        for axis, placement in enumerate(layout)
    )


def _joined(pieces: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """The whole matrix from its shards [ranks, ...], in the order of the axes that cut it."""
    for cut in reversed(cuts):
        # The last axis is the innermost: its shards make up those of the axes before it.
        groups = pieces.reshape(-1, cut.degree, *pieces.shape[1:])
        pieces = torch.stack([join(group, cut.dim, cut.parts) for group in groups])
    return pieces[0]


def _dealt(whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """The reverse of `_joined`."""
    pieces = whole[None]
    for cut in cuts:
        dealt = [deal(piece, cut.dim, cut.parts, cut.degree) for piece in pieces]
        pieces = torch.cat(dealt)
    return pieces
