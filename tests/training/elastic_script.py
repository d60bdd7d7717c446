"""An elastic training under `torchrun`, disturbed: `elastic_script.py FOLDER STEPS PAUSE
DISTURBANCE...`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.runtime.launch import heartbeat

ROWS = 12
BATCH = 12
SAMPLES = 60


class Net(nn.Module):
    """A classifier with dropout, and its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 24)
        self.up = nn.Linear(24, 48)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(48, ROWS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(
            self.down(self.drop(torch.relu(self.up(self.embed(x))))), y
        )


class Numbers(Dataset[tuple[int, int]]):
    """Numbers and the class of each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[int, int]:
        return place % ROWS, (5 * place + place // ROWS) % ROWS


def disturb(word: str, folder: Path, step: int) -> None:
    """`always SIGNAL RANK STEP` whenever this process, by its local rank, comes to a step; `once
    ...` the first time.
    """
    how, name, rank, at = word.split()
    if (
        int(rank) != int(os.environ.get("LOCAL_RANK", "0"))
        or step != int(at)
        or (how == "once" and (folder / "disturbed").exists())
    ):
        return
    (folder / "disturbed").touch()
    if name == "raise":
        raise ValueError("the memory of this rank is broken")
    os.kill(os.getpid(), signal.Signals[name])


def main(folder: Path, steps: int, disturbances: list[str], pause: float) -> None:
    """Train, and write down every step."""
    heartbeat.SILENCE = 3.0
    torch.manual_seed(0)
    data = Numbers()
    run = autopar.elastic(
        Net(),
        (torch.zeros(BATCH, dtype=torch.long),) * 2,
        folder / "saved",
        data=data,
        seed=4,
        scheme="zero3",
        optimizer=lambda module: autopar.local_optimizer(torch.optim.AdamW, module, lr=1.0),
    )
    schedule = run.track(
        "schedule", torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.02 / (1 + step))
    )
    loader = DataLoader(data, batch_sampler=run.sampler)
    for step, batch in run.steps(steps, loader, save_every=2):
        for word in disturbances:
            disturb(word, folder, step)
        loss = float(run.module.train_step(batch, run.optimizer))
        schedule.step()
        if int(os.environ.get("RANK", "0")) == 0:
            with (folder / "log").open("a", encoding="utf-8") as log:
                log.write(
                    json.dumps(
                        [
                            step,
                            loss,
                            batch[0].tolist(),
                            run.plan.devices,
                            run.optimizer.param_groups[0]["lr"],
                        ]
                    )
                    + "\n"
                )
        time.sleep(pause)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:], float(sys.argv[3]))
