"""The keys of the auto-parallel context: ranges, defaults, contradictions, and that a wrong call
leaves everything as it was.
"""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.errors import UsageError
from autopar.integrations.mindspore.context import current
from autopar.integrations.mindspore.context.keys import KEYS, MODES, RENAMED

DEFAULTS: dict[str, Any] = {
    "device_num": 1,
    "global_rank": 0,
    "gradients_mean": False,
    "parallel_mode": "stand_alone",
    "all_reduce_fusion_config": [],
    "gradient_fp32_sync": True,
    "auto_parallel_search_mode": "dynamic_programming",
    "strategy_ckpt_load_file": "",
    "strategy_ckpt_save_file": "",
    "full_batch": False,
    "enable_parallel_optimizer": False,
    "optimizer_weight_shard_size": -1,
    "pipeline_stages": 1,
    "parameter_broadcast": False,
}


def test_every_key_has_its_default() -> None:
    assert set(DEFAULTS) == set(KEYS)
    assert {name: autopar.get_auto_parallel_context(name) for name in KEYS} == DEFAULTS
    assert not current().active


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("parallel_mode", mode) for mode in MODES),
        ("device_num", 1),
        ("device_num", 4096),
        ("global_rank", 4095),
        ("gradients_mean", True),
        ("all_reduce_fusion_config", [20, 35]),
        ("gradient_fp32_sync", False),
        ("auto_parallel_search_mode", "recursive_programming"),
        ("auto_parallel_search_mode", "sharding_propagation"),
        ("strategy_ckpt_load_file", "./a"),
        ("strategy_ckpt_save_file", "./b"),
        ("full_batch", True),
        ("enable_parallel_optimizer", True),
        ("pipeline_stages", 4),
        ("parameter_broadcast", True),
    ],
)
def test_what_is_set_is_told_until_it_is_reset(key: str, value: Any) -> None:
    autopar.set_auto_parallel_context(**{key: value})
    assert autopar.get_auto_parallel_context(key) == value and current().active
    autopar.reset_auto_parallel_context()
    assert autopar.get_auto_parallel_context(key) == DEFAULTS[key] and not current().active


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"devices": 8}, "unknown key .*valid are device_num"),
        ({"device_nums": 8}, "Perhaps you meant 'device_num'"),
        ({"device_num": 0}, "from 1 to 4096"),
        ({"device_num": 4097}, "larger clusters are given to autopar.plan"),
        ({"device_num": True}, "whole number"),
        ({"device_num": 8.0}, "whole number"),
        ({"global_rank": 4096}, "from 0 to 4095"),
        ({"global_rank": -1}, "from 0 to 4095"),
        ({"device_num": 8, "global_rank": 8}, "none of the ranks 0 to 7"),
        ({"gradients_mean": 1}, "True or False"),
        ({"parallel_mode": "data"}, "valid are stand_alone, data_parallel"),
        ({"all_reduce_fusion_config": [35, 20]}, "ascending"),
        ({"all_reduce_fusion_config": [20, 20]}, "ascending"),
        ({"all_reduce_fusion_config": [0]}, "from 1 on"),
        ({"all_reduce_fusion_config": 20}, "as \\[20, 35\\]"),
        ({"auto_parallel_search_mode": "exhaustive"}, "valid are dynamic_programming"),
        ({"strategy_ckpt_load_file": None}, "path of a file"),
        ({"pipeline_stages": 0}, "from 1"),
        ({"optimizer_weight_shard_size": 0}, "or -1"),
        (
            {"parallel_mode": "data_parallel", "full_batch": True},
            "auto_parallel, semi_auto_parallel",
        ),
        (
            {"parallel_mode": "hybrid_parallel", "pipeline_stages": 2},
            "says nothing in the mode hybrid_parallel",
        ),
        (
            {"parallel_mode": "stand_alone", "gradients_mean": True},
            "says nothing in the mode stand_alone",
        ),
        ({"parallel_mode": "hybrid_parallel", "enable_parallel_optimizer": True}, "says nothing"),
        (
            {
                "parallel_mode": "semi_auto_parallel",
                "auto_parallel_search_mode": "recursive_programming",
            },
            "it is for auto_parallel",
        ),
        ({"parallel_mode": "data_parallel", "strategy_ckpt_load_file": "x"}, "says nothing"),
        (
            {"parallel_mode": "auto_parallel", "device_num": 8, "pipeline_stages": 3},
            "does not divide",
        ),
        (
            {"parallel_mode": "data_parallel", "optimizer_weight_shard_size": 2},
            "needs enable_parallel_optimizer",
        ),
        (
            {
                "parallel_mode": "data_parallel",
                "optimizer_weight_shard_size": 3,
                "enable_parallel_optimizer": True,
                "device_num": 8,
            },
            "does not divide the 8",
        ),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_is_set(keys: dict[str, Any], why: str) -> None:
    autopar.set_auto_parallel_context(device_num=16)
    with pytest.raises(UsageError, match=why):
        autopar.set_auto_parallel_context(**{"gradient_fp32_sync": False, **keys})
    assert dict(current().values) == {"device_num": 16}


@pytest.mark.parametrize("key", ["strategy_ckpt_save_file", "strategy_ckpt_load_file"])
@pytest.mark.parametrize("folder", ["./", ".", "not/there/"])
def test_a_folder_is_no_file_of_strategies(key: str, folder: str) -> None:
    with pytest.raises(UsageError, match=rf"{key} is '{folder}', a folder"):
        autopar.set_auto_parallel_context(**{key: folder})
    assert autopar.get_auto_parallel_context(key) == ""


def test_contradictions_with_the_mode_wait_until_there_is_one() -> None:
    autopar.set_auto_parallel_context(full_batch=True)  # as the document does, before any mode
    with pytest.raises(UsageError, match="full_batch"):
        current().require()
    autopar.set_auto_parallel_context(parallel_mode="auto_parallel")
    current().require()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("mirror_mean", "gradients_mean", True),
        ("search_mode", "auto_parallel_search_mode", "recursive_programming"),
    ],
)
def test_renamed_keys_are_known(old: str, new: str, value: Any) -> None:
    assert RENAMED[old] == new
    autopar.set_auto_parallel_context(**{old: value})
    assert autopar.get_auto_parallel_context(new) == value == autopar.get_auto_parallel_context(old)


def test_an_unknown_key_is_not_told() -> None:
    with pytest.raises(UsageError, match="valid are"):
        autopar.get_auto_parallel_context("devices")
