"""A training loop under `torchrun`, disturbed once: `loop_script.py FOLDER PLAN DISTURBANCE`."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import util
from pathlib import Path

import torch

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import heartbeat

STEPS = 8
AT = 5


def main(folder: Path, plan: Path, disturbance: str) -> None:
    """Train from the latest checkpoint; every rank says where it is, and rank 1 is disturbed in
    step `AT`, once.
    """
    spec = util.spec_from_file_location("nets", Path(__file__).with_name("nets.py"))
    assert spec is not None and spec.loader is not None
    nets = util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    heartbeat.SILENCE = 3.0
    module = autopar.parallelize(nets.language(), Plan.load(plan), (nets.tokens(0),))
    rank = int(os.environ["RANK"])
    optimizer = nets.optimizer_of(module)
    sampler = autopar.sampler(64, Plan.load(plan), seed=3)
    torch.manual_seed(5)
    resumed = autopar.resume(module, optimizer, folder / "saved", sampler=sampler)

    def save(done: int) -> None:
        autopar.save(module, optimizer, folder / "saved", step=done, sampler=sampler, keep=2)

    batches = sampler.counted(sampler, endless=True)
    for step, batch in zip(
        autopar.steps(resumed.step if resumed else 0, STEPS, save), batches, strict=False
    ):
        (folder / f"pid{rank}").write_text(str(os.getpid()), encoding="utf-8")
        disturbed = folder / "disturbed"
        if disturbance != "none" and rank == 1 and step == AT and not disturbed.exists():
            disturbed.touch()
            os.kill(os.getpid(), signal.Signals[disturbance])
        (loss,) = nets.train(module, optimizer, range(step, step + 1))
        if rank == 0:
            with (folder / "log").open("a", encoding="utf-8") as log:
                log.write(json.dumps([step, loss, batch]) + "\n")
        if (step + 1) % 2 == 0:
            save(step + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
