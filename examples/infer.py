"""Batch inference: `python examples/infer.py --ranks 2`, or by torchrun.

Outputs are whole on every rank, or stay split where made.

The plan is for inference: no gradients, no state of an optimizer. What is left of the samples fills
a last batch, and its rows are dropped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import Plan

BATCH = 8
SAMPLES = 20
FEATURES = 32
CLASSES = 10


def build() -> nn.Module:
    """A classifier; its weights are the same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, CLASSES)).eval()


def samples() -> Tensor:
    """The inputs to be classified."""
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))


def batches(values: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Batches of the planned size, and how many rows of each count."""
    for part in values.split(BATCH):
        yield torch.cat([part, part[:1].expand(BATCH - len(part), -1)]), len(part)


def planned(devices: int, scheme: str | None) -> Plan:
    """The plan for so many ranks."""
    return autopar.plan(
        build(),
        (samples()[:BATCH],),
        devices=devices,
        cluster="local-cpu",
        mode="infer",
        scheme=scheme,
    )


def classify(plan: Plan, outputs: Any = "whole") -> Tensor:
    """The classes of all samples.

    With `outputs` "split" each rank looks at its part of the scores before they are put together.
    """
    model = autopar.parallelize(build(), plan, (samples()[:BATCH],), outputs=outputs)
    chosen = []
    with torch.no_grad():
        for batch, count in batches(samples()):
            scores = model(batch)
            # A DTensor knows where its parts lie: what is asked of it is answered part by part.
            best = scores.argmax(-1)
            chosen.append((best if outputs == "whole" else best.full_tensor())[:count])
    return torch.cat(chosen)


def main(arguments: Sequence[str] | None = None) -> Tensor:
    """Classify on ranks, and say whether one device does the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--outputs", choices=("whole", "split"), default="whole")
    parser.add_argument("--scheme", default="data", help="a scheme known by name")
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        classes = classify(planned(int(os.environ["WORLD_SIZE"]), given.scheme), given.outputs)
    else:
        from autopar.runtime.launch import run_ranks

        classes = run_ranks(
            classify, given.ranks, planned(given.ranks, given.scheme), given.outputs
        )[0]
    wanted = build()(samples()).argmax(-1)
    if os.environ.get("RANK", "0") == "0":
        print(
            f"{len(classes)} samples classified, {int((classes != wanted).sum())} otherwise than "
            "on one device"
        )
    return classes


if __name__ == "__main__":
    main()
