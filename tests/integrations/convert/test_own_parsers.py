"""Configurations as their projects' own parsers read them, where these are installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from test_convert import PLANS, REFUSED, planned

from autopar.integrations.convert import convert
from autopar.plan import Plan


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(name) for name in PLANS}


def is_there(name: str) -> bool:
    """Whether a module can be imported; of one inside a package that is not there, no."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@pytest.mark.skipif(
    not is_there("torchtitan.config.job_config"),
    reason="torchtitan up to 0.2 is not installed, the last that reads TOML",
)
@pytest.mark.parametrize("name", PLANS)
def test_torchtitan(plans: dict[str, Plan], name: str, tmp_path: Path) -> None:
    from torchtitan.config import ConfigManager

    (tmp_path / "plan.toml").write_text(convert(plans[name], "torchtitan", "0.2").text)
    parsed = ConfigManager().parse_args(["--job.config_file", str(tmp_path / "plan.toml")])
    degrees = parsed.parallelism
    assert degrees.tensor_parallel_degree * abs(
        degrees.data_parallel_shard_degree
    ) * degrees.data_parallel_replicate_degree in (1, 2, 4)


@pytest.mark.skipif(not is_there("deepspeed.runtime.config"), reason="DeepSpeed is not installed")
@pytest.mark.parametrize("name", PLANS)
def test_deepspeed(plans: dict[str, Plan], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (name, "deepspeed") in REFUSED:
        pytest.skip("the target cannot express it")
    from deepspeed.runtime import config

    text = convert(plans[name], "deepspeed").text
    ranks = 4 // json.loads(text).get("tensor_parallel", {}).get("autotp_size", 1)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: ranks)
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    configuration = config.DeepSpeedConfig(json.loads(text))
    assert configuration.train_batch_size == 8
