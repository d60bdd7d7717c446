"""The members of a unit that are brought to their narrow copies on the way to their readers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.runtime.local_forms.narrow_weights import WeightCast, scale_type
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.redistribution.flat_messages import Carried, carry
from autopar.runtime.redistribution.steps import Move


class NarrowMembers:
    """Members of one message with their casts, and the scales once these are made.

    Without casts, members travel and are read as they are.
    """

    def __init__(self, casts: Sequence[WeightCast], shards: Sequence[Tensor]) -> None:
        self.casts = casts
        self.dtypes = [shard.dtype for shard in shards[: len(casts)]]
        self.scales: list[Tensor] = []
        self._shards = list(shards[: len(casts)])

    def cast(self, summed: Sequence[AxisGroup | None]) -> Carried:
        """Make the scales of whole blocks, and the elements of the shards.

        `summed`: by the kind of scale, the ranks that share blocks.
        """
        kinds: list[list[Tensor]] = []
        # All ranks of a group come here, even those whose shards hold no part of a block.
        for kind, group in enumerate(summed):
            pairs = zip(self.casts, self._shards, strict=True)
            largest = [cast.largest(shard, kind) for cast, shard in pairs]
            if group is not None:
                moves = [Move("all_reduce", reduction="max")] * len(largest)
                largest = yield from carry(largest, [(moves, group)])
            kinds.append(largest)
        self.scales = [
            cast.scales_from(largest, scale_type(dtype))
            for cast, dtype, *largest in zip(self.casts, self.dtypes, *kinds, strict=True)
        ]
        # The shards in the type of the computation may go while their elements travel.
        shards = self._shards
        self._shards = []
        return [
            cast.elements(shard, scales)
            for cast, shard, scales in zip(self.casts, shards, self.scales, strict=True)
        ]

    def read(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """The values that have come, as operators read them."""
        if not self.casts:
            return values
        return [
            cast.weight(value, scales, dtype)
            for cast, value, scales, dtype in zip(
                self.casts, values, self.scales, self.dtypes, strict=True
            )
        ]
