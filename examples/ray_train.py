"""A plan in Ray Train: `python examples/ray_train.py --workers 2`.

Ray starts ranks and process group, which autopar takes as they are.

The network is so small that one worker would be faster alone, which the search would find: so the
plan is asked to split the batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

STEPS = 5


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A whole batch, the same on every worker."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, x[:, :8].argmax(1)


def train_loop(
    config: dict[str, Any], report: Callable[[dict[str, float]], None] | None = None
) -> list[float]:
    """Train on a worker and return its losses.

    `report` is Ray's, where it is not given.
    """
    if report is None:
        from ray import train
        from ray.train.torch import get_device

        report = train.report
        # Ray makes the process group itself, and leaves the first GPU current on every worker.
        if (device := get_device()).type == "cuda":
            torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = Net()
    devices = torch.distributed.get_world_size()
    plan = autopar.plan(
        net, batch(0), devices=devices, cluster=config["cluster"], optimizer="adamw", scheme="data"
    )
    model = autopar.parallelize(net, plan)
    optimizer = autopar.local_optimizer(torch.optim.AdamW, model, lr=1e-2)
    losses = []
    for step in range(config["steps"]):
        losses.append(float(model.train_step(batch(step), optimizer)))
        report({"loss": losses[-1]})
    return losses


def main() -> None:
    """Have Ray start the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    given = parser.parse_args()
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": STEPS, "cluster": None if given.gpu else "local-cpu"},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        torch_config=TorchConfig(backend="nccl" if given.gpu else "gloo"),
    )
    result = trainer.fit()
    print(f"losses: {result.return_value}")


if __name__ == "__main__":
    main()
