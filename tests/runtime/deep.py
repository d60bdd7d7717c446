"""A model of equal layers, and the ways in which it is planned with stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"devices": 2, "stages": 2, "micro_batches": 4, "schedule": "1f1b"},
    "interleaved": {
        "devices": 2,
        "stages": 2,
        "micro_batches": 4,
        "schedule": "interleaved",
        "interleave": 2,
    },
    "data": {"devices": 4, "scheme": "pipeline-1f1b 2 x data 2"},
}


class Deep(nn.Module):
    """Layers for stages, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        output: Tensor = self.layers(x)
        return output.square().mean()
