"""Plain state that a forward pass writes and reads is refused; caches and counters pass."""

from __future__ import annotations

import gc
import itertools
import random
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.frontends.torch import import_torch
from autopar.frontends.torch import importer as whole_importer

X = torch.ones(4, 8)
STATE: dict[str, Any] = {"n": 0}
TABLES: dict[int, Tensor] = {}


def _counting() -> Any:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


COUNTED = _counting()


class Base(nn.Module):
    """A layer, and state."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.log: list[Any] = []
        self.mean = 1.0
        self.options = types.SimpleNamespace(count=0)


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class Branching(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(x) if self.calls < 100 else x


class Appending(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        return self.linear(x) * len(self.log)


class Averaging(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.2
        return self.linear(x) * self.mean


class OfObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.options.count += 1
        return self.linear(x) * self.options.count


class OfClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        return self.linear(x) * self.seen


class OfGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        STATE["n"] += 1
        return self.linear(x) * STATE["n"]


class OfClosure(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * COUNTED()


class Carrying(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        last = STATE.get("last")
        STATE["last"] = y.detach()
        return y if last is None else y + last


def _grown(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return x * len(seen)


class OfDefault(Base):
    def forward(self, x: Tensor) -> Tensor:
        return _grown(self.linear(x))


WRITTEN = {
    Counted: "self.calls",
    Branching: "self.calls",
    Appending: "self.log",
    Averaging: "self.mean",
    OfObject: "self.options.count",
    OfClass: "OfClass.seen",
    OfGlobal: "STATE['n']",
    OfClosure: "count of counted",
    Carrying: "STATE['last']",
    OfDefault: "a default of _grown",
}
"""Models, and what their passes write and read."""


class Logging(Base):
    """State that only tells of the calls."""

    def forward(self, x: Tensor) -> Tensor:
        start = time.time()
        self.calls += 1
        STATE["n"] += 1
        y = self.linear(x)
        self.log.append((self.calls, time.time() - start))
        print(f"call {self.calls}", end="")
        return y


class Caching(Base):
    """A number and a table that are made once."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if size not in TABLES:
            TABLES[size] = torch.arange(size).float()
        if not hasattr(self, "factor"):
            self.factor = 3.0
        return self.linear(x * TABLES[size]) * self.factor


class Timed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * time.time()


def _state(module: Base) -> list[Any]:
    held = [module.calls, list(module.log), module.mean, module.options.count]
    return [
        *held,
        type(module).seen,
        dict(STATE),
        dict(TABLES),
        COUNTED.__closure__[0].cell_contents,
    ]


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.__name__)
def test_state_that_is_written_and_read_is_refused(kind: type[Base]) -> None:
    module = kind()
    before = _state(module)
    with pytest.raises(ModelError, match=r"test_passes\.py:\d+") as error:
        import_torch(module, (X,))
    assert f"the forward pass writes {WRITTEN[kind]}" in str(error.value)
    assert "register_buffer" in str(error.value)
    assert _state(module) == before


@pytest.mark.parametrize("kind", [Logging, Caching], ids=lambda kind: kind.__name__)
def test_counters_that_nothing_reads_and_caches_pass(kind: type[Base]) -> None:
    module = kind()
    before = _state(module)
    import_torch(module, (X,))
    assert _state(module) == before


class Drawing(Base):
    """A generator or an iterator that a pass takes a number from, of the module or outside."""

    def __init__(self, source: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.source = source
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.take(self.source)


GIVING: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "random": (random.Random(0), lambda source: source.random()),
    "numpy": (np.random.default_rng(0), lambda source: float(source.random())),
    "count": (itertools.count(1), next),
}


@pytest.mark.parametrize("name", GIVING)
def test_what_gives_another_number_each_time_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"takes from a generator or an iterator \(test_passes"):
        import_torch(Drawing(*GIVING[name]), (X,))


def test_a_clock_is_refused_where_its_time_is_computed_with() -> None:
    with pytest.raises(ModelError, match=r"asks for the time, or .* \(test_passes\.py:\d+\)"):
        import_torch(Timed(), (X,))


def test_without_the_record_state_is_kept_at_its_first_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole_importer, "with_facts", lambda module, imported: imported())
    assert import_torch(Counted(), (X,)).graph.operators


class _Loading(dict):  # type: ignore[type-arg]
    """A mapping that fails where it is asked for its items, as one that loads them may."""

    def keys(self) -> Any:
        raise ValueError("not installed")

    def __iter__(self) -> Any:
        raise ValueError("not installed")

    def __getitem__(self, key: object) -> Any:
        raise ValueError("not installed")


def test_a_mapping_that_loads_its_items_is_not_asked_for_them() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = _Loading(a=1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) if self.table is not None else x

    assert import_torch(Held(), (torch.randn(2, 4),)).graph.operators


def test_what_the_collector_of_garbage_calls_is_no_code_of_the_model() -> None:
    calls = []

    def counted(phase: str, info: dict[str, int]) -> None:
        calls.append(len(calls))

    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            gc.collect()
            return self.linear(x)

    gc.callbacks.append(counted)
    try:
        import_torch(Collecting(), (torch.randn(2, 4),))
        assert counted in gc.callbacks
    finally:
        gc.callbacks.remove(counted)
