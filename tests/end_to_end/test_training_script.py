"""An ordinary training script under torchrun gives the losses of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from tests.end_to_end.models import ROOT

from . import train_script


@pytest.mark.slow
def test_losses_of_one_device(tmp_path: Path) -> None:
    """The loss is made outside of the plan, norms are clipped, and checkpoints are carried on under
    other plans.
    """
    files = []
    for scheme in ("megatron", "zero3"):
        plan = autopar.plan(
            train_script.build(),
            (train_script.batch(0),),
            devices=2,
            cluster="local-cpu",
            scheme=scheme,
        )
        files.append(str(tmp_path / f"{scheme}.json"))
        plan.save(files[-1])
    assert any(
        "/3" in parameter.storage for parameter in autopar.Plan.load(files[0]).parameters.values()
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(Path(train_script.__file__)),
    ]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(tmp_path), *files, files[0]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = pytest.approx(train_script.on_one_device(), rel=1e-9)
    for rank in range(2):
        actual = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert actual["same_keys"]
        assert actual["seen"] == expected
