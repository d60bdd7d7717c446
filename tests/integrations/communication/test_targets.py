"""The kind of device that a program sets, and the backend that `init` takes for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import autopar
from autopar import communication as comm
from autopar.errors import RunError, UsageError
from autopar.integrations.mindspore.context import target_backend


@pytest.fixture(autouse=True)
def _unset() -> Iterator[None]:
    yield
    autopar.set_context(device_target=None)


def test_a_target_names_the_backend() -> None:
    assert target_backend() is None
    for target, backend in (("Ascend", "hccl"), ("GPU", "nccl"), ("CPU", "gloo")):
        autopar.set_context(device_target=target)
        assert target_backend() == backend
    with pytest.raises(UsageError, match="unknown device_target 'TPU': valid are Ascend, GPU, CPU"):
        autopar.set_context(device_target="TPU")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="has Ascend devices")
@pytest.mark.parametrize("given", [None, "hccl"])
def test_what_is_not_installed_is_refused_before_ranks_meet(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks of a launcher would wait for each other.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    autopar.set_context(device_target="Ascend")
    with pytest.raises(RunError, match="hccl needs Ascend devices and the package torch_npu"):
        comm.init(given)
