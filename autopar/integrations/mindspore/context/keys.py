"""The keys of the auto-parallel context.

A key has values, a default, and the modes in which it has an effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import UsageError, unknown

MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
CUT_BY_OPERATOR = frozenset({"semi_auto_parallel", "auto_parallel"})
"""The modes in which operators may be cut each in its own way."""
SEVERAL = frozenset(MODES) - {"stand_alone"}
SEARCH_MODES: Mapping[str, str] = {
    "dynamic_programming": "dynamic_programming",
    "recursive_programming": "recursive_programming",
    "sharding_propagation": "dynamic_programming",
}
"""The search method of each search mode.

Propagation from a few pinned operators is the search with these pins.
"""
MOST_DEVICES = 4096
RENAMED: Mapping[str, str] = {
    "mirror_mean": "gradients_mean",
    "search_mode": "auto_parallel_search_mode",
}
"""Keys that MindSpore has had under other names, before r1.0 and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key. `check` returns the value to keep, or raises.

    `modes`: modes where a changed value has an effect.
    """

    default: object
    words: str
    check: Callable[[str, object], object]
    modes: frozenset[str] = frozenset(MODES)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it is True or False")
    return value


def _whole(low: int, high: int, also: tuple[int, ...] = ()) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not (low <= value <= high or value in also)
        ):
            more = "".join(f", or {other}" for other in also)
            beyond = (
                "; larger clusters are given to autopar.plan as cluster=..., devices=..."
                if name == "device_num"
                else ""
            )
            raise UsageError(
                f"{name} is {value!r}; it is a whole number from {low} to {high}{more}{beyond}"
            )
        return value

    return check


def _one_of(valid: Sequence[str]) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in valid:
            raise UsageError(unknown(name, value, valid))
        return value

    return check


def _path(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r}; it is the path of a file, or '' for none")
    if value and (value.endswith(("/", os.sep)) or Path(value).is_dir()):
        raise UsageError(
            f"{name} is {value!r}, a folder; it is the path of a file, as "
            f"{os.path.join(value, 'strategy.json')!r}, or '' for none"
        )
    return value


def _cuts(name: str, value: object) -> tuple[int, ...]:
    """Numbers of reductions, ascending."""
    numbers = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if (
        numbers is None
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers)
        or sorted({*numbers}) != [*numbers]
    ):
        raise UsageError(
            f"{name} is {value!r}; it is a list of ascending whole numbers from 1 on, as [20, 35]"
        )
    return numbers


KEYS: Mapping[str, Key] = {
    "device_num": Key(
        default=None,
        check=_whole(1, MOST_DEVICES),
        words="number of devices; by default the size of the process group, else 1",
    ),
    "global_rank": Key(
        default=None,
        check=_whole(0, MOST_DEVICES - 1),
        words="number of this device; by default that of the process group, else 0",
    ),
    "gradients_mean": Key(
        default=False,
        check=_flag,
        words="whether reduced gradients are divided by the number of their shares",
        modes=SEVERAL,
    ),
    "parallel_mode": Key(
        default="stand_alone", check=_one_of(MODES), words="how the devices share the work"
    ),
    "all_reduce_fusion_config": Key(
        default=(),
        check=_cuts,
        modes=SEVERAL,
        words="where the reductions of gradients, in the order of the backward pass, are cut",
    ),
    "gradient_fp32_sync": Key(
        default=True,
        check=_flag,
        modes=SEVERAL,
        words="whether 16-bit gradients are added up in float32",
    ),
    "auto_parallel_search_mode": Key(
        default="dynamic_programming",
        check=_one_of(tuple(SEARCH_MODES)),
        modes=frozenset({"auto_parallel"}),
        words="how is searched",
    ),
    "strategy_ckpt_load_file": Key(
        default="",
        check=_path,
        modes=CUT_BY_OPERATOR,
        words="strategies to keep: a plan, or MindSpore's JSON or protobuf",
    ),
    "strategy_ckpt_save_file": Key(
        default="",
        check=_path,
        modes=CUT_BY_OPERATOR,
        words="where strategies are written: .json, or .ckpt for protobuf",
    ),
    "full_batch": Key(
        default=False,
        check=_flag,
        modes=CUT_BY_OPERATOR,
        words="whether every rank is given the whole batch, and not its part of it",
    ),
    "enable_parallel_optimizer": Key(
        default=False,
        check=_flag,
        modes=CUT_BY_OPERATOR | {"data_parallel"},
        words="whether weights are stored and updated in parts: ZeRO",
    ),
    "optimizer_weight_shard_size": Key(
        default=-1,
        check=_whole(1, MOST_DEVICES, (-1,)),
        modes=CUT_BY_OPERATOR | {"data_parallel"},
        words="into how many parts a weight is cut for its update; -1: as many as it has copies",
    ),
    "pipeline_stages": Key(
        default=1,
        check=_whole(1, MOST_DEVICES),
        modes=CUT_BY_OPERATOR,
        words="number of pipeline stages",
    ),
    "parameter_broadcast": Key(
        default=False,
        check=_flag,
        modes=SEVERAL,
        words="whether rank 0 gives all ranks its weights; else these must be equal",
    ),
}
"""The keys, by name."""


def key_named(name: str) -> str:
    """The present name of a key; an unknown key is a `UsageError` that lists the valid ones."""
    present = RENAMED.get(name, name)
    if present not in KEYS:
        raise UsageError(unknown("key of the auto-parallel context", name, KEYS))
    return present
