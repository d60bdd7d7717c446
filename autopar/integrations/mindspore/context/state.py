"""The auto-parallel context: the keys that have been set, checked for contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autopar.errors import UsageError, unknown

from .keys import CUT_BY_OPERATOR, KEYS, SEARCH_MODES, key_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The keys that have been set, by name; every other one has its default."""

    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS:
            raise AttributeError(name)
        return self.values.get(name, KEYS[name].default)

    def given(self, name: str) -> bool:
        """Whether a key has been set."""
        return name in self.values

    @property
    def active(self) -> bool:
        """Whether plans follow the context: some key has been set."""
        return bool(self.values)

    @property
    def in_parts(self) -> bool:
        """Whether each rank is given its part of the batch."""
        return self.active and self.mode != "stand_alone" and not self.full_batch

    @property
    def mode(self) -> str:
        """The parallel mode."""
        return str(self.parallel_mode)

    @property
    def method(self) -> str:
        """The search method."""
        return SEARCH_MODES[self.auto_parallel_search_mode]

    @property
    def cut_by_operator(self) -> bool:
        """Whether operators may be cut each in its own way."""
        return self.mode in CUT_BY_OPERATOR

    @property
    def devices(self) -> int:
        """The number of devices: `device_num`, or else the size of the process group."""
        return int(self.device_num) if self.device_num is not None else _group_size()

    def require(self) -> None:
        """Raise where a value says nothing in the mode, or contradicts another."""
        for name, value in self.values.items():
            if value != KEYS[name].default and self.mode not in KEYS[name].modes:
                valid = ", ".join(sorted(KEYS[name].modes))
                raise UsageError(
                    f"{name}={value!r} says nothing in the mode {self.mode}; it is for {valid}"
                )
        if self.device_num is not None and self.device_num % self.pipeline_stages:
            raise UsageError(
                f"pipeline_stages={self.pipeline_stages} does not divide "
                f"device_num={self.device_num}"
            )
        size = self.optimizer_weight_shard_size
        if size != -1 and not self.enable_parallel_optimizer:
            raise UsageError(
                f"optimizer_weight_shard_size={size} needs enable_parallel_optimizer=True"
            )
        if (
            size != -1
            and self.device_num is not None
            and (self.device_num // self.pipeline_stages) % size
        ):
            raise UsageError(
                f"optimizer_weight_shard_size={size} does not divide the "
                f"{self.device_num // self.pipeline_stages} devices"
            )


@dataclass(slots=True)
class _Held:
    """The context of this process."""

    context: Context = field(default_factory=Context)
    target: str | None = None


_HELD = _Held()


def current() -> Context:
    """The context of this process."""
    return _HELD.context


TARGETS: Mapping[str, str] = {"Ascend": "hccl", "GPU": "nccl", "CPU": "gloo"}
"""The backend of each kind of device."""


def set_context(*, device_target: str | None) -> None:
    """Set the kind of device that ranks use: "Ascend", "GPU" or "CPU"; None: what is at hand.

    `communication.init` takes its backend where it is given none.
    """
    if device_target is not None and device_target not in TARGETS:
        raise UsageError(unknown("device_target", str(device_target), TARGETS))
    _HELD.target = device_target


def target_backend() -> str | None:
    """The backend of the kind of device that `set_context` has set."""
    return None if _HELD.target is None else TARGETS[_HELD.target]


def set_auto_parallel_context(**keys: Any) -> None:
    """Set keys of the context.

    Keys that are not named stay unchanged, and an error leaves all of them unchanged.

    From then on `autopar.plan` and `autopar.parallelize` follow the context. Keys without effect in
    the mode are refused as soon as a mode has been set, or else when a plan is made.
    """
    checked = {
        key_named(name): KEYS[key_named(name)].check(key_named(name), value)
        for name, value in keys.items()
    }
    made = Context(values=MappingProxyType({**current().values, **checked}))
    rank = made.global_rank
    devices = made.device_num
    if rank is not None and devices is not None and rank >= devices:
        raise UsageError(
            f"global_rank={rank} is none of the ranks 0 to {devices - 1} of device_num={devices}"
        )
    if made.given("parallel_mode"):
        made.require()
    _HELD.context = made


def get_auto_parallel_context(key: str) -> Any:
    """The value of a key, or its default.

    `device_num` and `global_rank` default to those of the process group.
    """
    name = key_named(key)
    value = getattr(current(), name)
    if value is None:
        return _group_size() if name == "device_num" else _group_rank()
    return list(value) if isinstance(value, tuple) else value


def reset_auto_parallel_context() -> None:
    """Give every key its default, so that plans are made as if there were no context."""
    _HELD.context = Context()


def _group_size() -> int:
    dist = _process_group()
    return int(dist.get_world_size()) if dist is not None else 1


def _group_rank() -> int:
    dist = _process_group()
    return int(dist.get_rank()) if dist is not None else 0


def _process_group() -> Any:
    """torch.distributed, where some other part of the program has imported it and ranks run."""
    import sys

    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
