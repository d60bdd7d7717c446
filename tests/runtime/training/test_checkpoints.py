"""Checkpoints between plans and numbers of ranks: bits stay, the loss goes on, and what is killed
or damaged is never half a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from autopar.errors import AutoparError, PlanError, RunError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.training import checkpoint_storage
from autopar.runtime.training.checkpoint_storage import SafeReader
from autopar.runtime.training.durable_files import torch_dtype
from autopar.runtime.training.folder_lock import LOCK
from autopar.runtime.training.latest import LATEST, find_checkpoint, latest_in
from autopar.runtime.training.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    checkpoints_in,
    manifest_text,
    read_manifest,
)
from autopar.runtime.training.resuming import resume
from autopar.runtime.training.saving import on_host, save
from tests.runtime.training.nets import Language, built, language, optimizer_of, plan_of, train

STEP = 3
EXTRA = {"schedule": [1, 2.5, None]}


def whole(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """All of a checkpoint, whole."""
    manifest, _ = read_manifest(path)
    state: dict[str, Any] = {
        name: torch.zeros(e.shape, dtype=torch_dtype(e.dtype))
        for name, e in manifest.tensors.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(state, storage_reader=SafeReader(path, manifest), no_dist=True)
    return manifest, state


def require_same(first: Path, second: Path) -> None:
    """Two checkpoints hold the same, bit for bit."""
    one, values = whole(first)
    other, others = whole(second)
    assert values.keys() == others.keys() and len(values) > 30
    assert [name for name in values if not torch.equal(values[name], others[name])] == []
    assert one.scalars == other.scalars and len(one.scalars) > 8
    assert [(set(g.names), g.options) for g in one.groups] == [
        (set(g.names), g.options) for g in other.groups
    ]
    assert (one.step, one.extra, one.optimizer) == (other.step, other.extra, other.optimizer)


def _undisturbed(scheme: str, devices: int, folder: str) -> list[float]:
    module, optimizer = built(scheme, devices)
    torch.manual_seed(5)
    train(module, optimizer, range(STEP))
    save(module, optimizer, folder, step=STEP, extra=EXTRA)
    return train(module, optimizer, range(STEP, STEP + 3))


def _again(scheme: str, devices: int, folder: str, other: str) -> list[float]:
    """Resumed under a plan, saved elsewhere as it is, and trained on."""
    module, optimizer = built(scheme, devices, seed=1)
    resumed = resume(module, optimizer, folder)
    assert resumed is not None and (resumed.step, resumed.extra, resumed.notes) == (STEP, EXTRA, ())
    save(module, optimizer, other, step=STEP, extra=EXTRA)
    return train(module, optimizer, range(STEP, STEP + 3))


def require_chain(tmp_path: Path, plans: list[tuple[str, int]]) -> None:
    """Saved under the first plan, and from there on to each of the others."""
    for plan in plans:
        plan_of(*plan)
    folders = [tmp_path / str(number) for number in range(len(plans))]
    losses = run_ranks(_undisturbed, plans[0][1], *plans[0], str(folders[0]))[0]
    for number in range(1, len(plans)):
        scheme, devices = plans[number]
        results = run_ranks(
            _again, devices, scheme, devices, str(folders[number - 1]), str(folders[number])
        )
        first, second = (find_checkpoint(folders[at]) for at in (number - 1, number))
        assert first is not None and second is not None
        require_same(first, second)
        if plans[number] == plans[0]:
            assert results[0] == losses
        assert results[0] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("plans", [[("zero3", 2), ("stages", 2), ("alone", 1)]])
def test_from_plan_to_plan(tmp_path: Path, plans: list[tuple[str, int]]) -> None:
    require_chain(tmp_path, plans)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "plans",
    [
        [("zero3", 4), ("megatron", 2), ("alone", 1), ("zero3", 4)],
        [("megatron x data", 4), ("zero3", 2), ("alone", 1), ("megatron x data", 4)],
        [("stages", 2), ("zero3", 4), ("alone", 1), ("stages", 2)],
        [("zero1", 2), ("data", 2), ("megatron x data", 4), ("zero1", 2)],
    ],
    ids=lambda plans: f"{plans[0][0]} {plans[0][1]}",
)
def test_from_many_ranks_and_back(tmp_path: Path, plans: list[tuple[str, int]]) -> None:
    require_chain(tmp_path, plans)


def _plain(
    folder: Path, *, step: int = STEP, seed: int = 0, **options: Any
) -> tuple[Language, torch.optim.Optimizer]:
    module = language(seed)
    optimizer = optimizer_of(module)
    train(module, optimizer, range(2))
    save(module, optimizer, folder, step=step, extra=EXTRA, **options)
    return module, optimizer


def _planned_again(folder: str, other: str) -> None:
    module, optimizer = built("zero3", 2, seed=1)
    assert resume(module, optimizer, folder) is not None
    save(module, optimizer, other, step=STEP, extra=EXTRA)


def test_from_the_plain_module_and_back(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    module, optimizer = _plain(tmp_path / "plain")
    run_ranks(_planned_again, 2, str(tmp_path / "plain"), str(tmp_path / "planned"))
    actual = [find_checkpoint(tmp_path / name) for name in ("plain", "planned")]
    assert actual[0] is not None and actual[1] is not None
    require_same(actual[0], actual[1])
    assert {path.suffix for path in actual[1].iterdir()} == {
        ".json",
        ".safetensors",
    }  # nothing that a reader would have to unpickle
    other = language(1)
    again = optimizer_of(other)
    torch.manual_seed(0)
    assert resume(other, again, tmp_path / "planned") is not None
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    state = torch.get_rng_state()
    assert resume(module, optimizer, tmp_path / "planned") is not None and torch.equal(
        state, torch.get_rng_state()
    )
    assert (
        train(module, optimizer, range(2))
        == (torch.set_rng_state(state), train(other, again, range(2)))[1]
    )


def test_nothing_saved(tmp_path: Path) -> None:
    assert resume(language(), None, tmp_path / "none") is None


def _one_more(module: nn.Module) -> None:
    module.register_parameter("more", nn.Parameter(torch.zeros(3)))


def _to(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    return lambda module: module.to(dtype) and None


MODULES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "more": (_one_more, "'more' is in the model, not in the checkpoint"),
    "less": (
        lambda module: module._modules.pop("up"),
        "'up.weight' is in the checkpoint, not in the model",
    ),
    "type": (_to(torch.bfloat16), "'embed.weight' is bfloat16 [24, 16], saved as float32 [24, 16]"),
    "shape": (
        lambda m: setattr(m, "out", nn.Linear(16, 8)),
        "'out.weight' is float32 [8, 16], saved as float32 [16, 16]",
    ),
}
OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "kind": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "the optimizer is SGD, that of the checkpoint AdamW",
    ),
    "groups": (
        lambda m: torch.optim.AdamW(m.parameters()),
        "the optimizer has 1 groups of parameters, that of the checkpoint 2",
    ),
    "order": (
        lambda m: torch.optim.AdamW(optimizer_of(m).param_groups[::-1]),
        "'norm.weight' is in group 0 of the optimizer, not in",
    ),
}


@pytest.mark.parametrize("case", [*MODULES, *OPTIMIZERS])
def test_what_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    _plain(tmp_path)
    module = language(1)
    if case in MODULES:
        MODULES[case][0](module)
    optimizer = OPTIMIZERS[case][0](module) if case in OPTIMIZERS else None
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(PlanError) as raised:
        resume(module, optimizer, tmp_path)
    assert (MODULES | OPTIMIZERS)[case][1] in str(raised.value)  # type: ignore[operator]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_last_few_stay(tmp_path: Path) -> None:
    for step in (5, 6, 2, 2):
        _plain(tmp_path, step=step, keep=2)
    assert (
        checkpoints_in(tmp_path) == ["step-00000002", "step-00000002.1"]
        and latest_in(tmp_path) == "step-00000002.1"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000002.1",
        LOCK,
    ]
    resumed = resume(language(), None, tmp_path, name="step-00000002")
    assert resumed is not None and resumed.path == tmp_path / "step-00000002"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        held = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))
        change(held)
        # As by a hand that knows of no digests.
        held.pop("digest")
        (path.parents[1] / LATEST).write_text(path.parent.name, encoding="utf-8")
        (path.parent / MANIFEST).write_text(json.dumps(held), encoding="utf-8")

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "rank-00000.safetensors is missing"),
    "cut": (_cut, "bytes instead of"),
    "flipped": (_flip, "is not what was saved"),
    "elsewhere": (
        _edit(lambda held: held["files"].update({"../x": 1})),
        "'../x' is no file of a rank",
    ),
    "a piece less": (
        _edit(lambda held: held["tensors"]["optimizer.out.bias.exp_avg"].update(pieces=[])),
        "do not make it up",
    ),
    "too large": (
        _edit(lambda held: held["tensors"]["optimizer.out.bias.exp_avg"].update(shape=[2**50])),
        "do not make it up",
    ),
    "another format": (_edit(lambda held: held.update(schema="other")), "no checkpoint"),
    "a later version": (_edit(lambda held: held.update(version=2)), "version 2 of a checkpoint"),
    "no json": (lambda path: (path.parent / MANIFEST).write_text("{"), "cannot be read"),
    "pointer": (
        lambda path: (path.parents[1] / "latest").write_text("../step-00000001"),
        "is no checkpoint",
    ),
    "pointer to nothing": (
        lambda path: (path.parents[1] / "latest").write_text("step-00000009"),
        "unknown checkpoint 'step-00000009'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    _plain(tmp_path, step=1)
    _plain(tmp_path, step=2)
    DAMAGES[damage][0](tmp_path / "step-00000002" / "rank-00000.safetensors")
    module = language()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(AutoparError, match=DAMAGES[damage][1].replace("(", "\\(")):
        resume(module, None, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    resumed = resume(language(), None, tmp_path, name="step-00000001")
    assert resumed is not None and resumed.step == 1


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """In every file of a folder of two checkpoints, of which either could be the latest."""
    plan_of("zero3", 2)
    run_ranks(_undisturbed, 2, "zero3", 2, str(tmp_path))
    saved = tmp_path / f"step-{STEP:08d}"
    _saved_again(tmp_path, saved)
    paths = [path for path in (tmp_path / LATEST, *sorted(saved.iterdir())) if path.is_file()]
    assert [path.name for path in paths] == [
        *(LATEST, MANIFEST, PLAN, "rank-00000.safetensors", "rank-00001.safetensors")
    ]
    drawn = random.Random(0)
    for path in paths:
        data = path.read_bytes()
        for _ in range(60):
            _one_bit_else(path, data, drawn.randrange(8 * len(data)))
            with pytest.raises(AutoparError):
                resume(language(), None, tmp_path)
        path.write_bytes(data)
    assert resume(language(), None, tmp_path) is not None


def _saved_again(folder: Path, saved: Path) -> None:
    """Copies of a checkpoint under every name that one bit makes of its own."""
    *first, last = saved.name
    for bit in range(8):
        other = chr(ord(last) ^ 1 << bit)
        if other.isdecimal():
            shutil.copytree(saved, folder / "".join([*first, other]))
            path = folder / "".join([*first, other]) / MANIFEST
            manifest = read_manifest(path.parent)[0].model_copy(update={"step": int(other)})
            path.write_text(manifest_text(manifest), encoding="utf-8")
    assert len(checkpoints_in(folder)) >= 2


def _one_bit_else(path: Path, data: bytes, bit: int) -> None:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)


def test_every_bit_of_the_name_of_the_latest_counts(tmp_path: Path) -> None:
    _plain(tmp_path, step=6)
    _saved_again(tmp_path, tmp_path / "step-00000006")
    path = tmp_path / LATEST
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        _one_bit_else(path, data, bit)
        with pytest.raises(PlanError):
            find_checkpoint(tmp_path)
    path.write_bytes(data)
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000006"
    # Of a version before, or of a hand: a name alone.
    path.write_text("step-00000007\n", encoding="utf-8")
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000007"


def _refused(folder: str) -> tuple[str, bool]:
    """The message that a rank gets for a damaged checkpoint, and whether its module and its
    optimizer are unchanged.
    """
    module, optimizer = built("zero3", 2)
    before = [value.clone() for value in module.full_values(module.graph_parameters()).values()]
    with pytest.raises(PlanError) as raised:
        resume(module, optimizer, folder)
    after = module.full_values(module.graph_parameters()).values()
    return str(raised.value), not optimizer.state and all(map(torch.equal, before, after))


def test_damage_that_one_rank_finds_stops_all(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    _plain(tmp_path)
    _flip(tmp_path / f"step-{STEP:08d}" / "rank-00000.safetensors")
    for said, untouched in run_ranks(_refused, 2, str(tmp_path)):
        assert "is not what was saved" in said and untouched


def _killed(folder: Path, calls: int) -> int:
    """Save in another process, which is killed at that call of the file system; the number of calls
    it made if it was not.
    """
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return -1 if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
    torch.set_num_threads(1)  # the threads of OpenMP do not come along
    made = 0

    def dying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        return call

    for name in ("fsync", "open", "replace", "rename", "mkdir"):
        setattr(checkpoint_storage.os, name, dying(getattr(os, name)))
    try:
        _plain(folder, step=2, seed=1, keep=1)
    finally:
        os._exit(made if made < 255 else 254)


def test_killed_anywhere_in_a_save(tmp_path: Path) -> None:
    """`latest` names a whole checkpoint, that before or the new one, wherever the save is killed;
    and the next save cleans up.
    """
    module, _ = _plain(tmp_path / "first", step=1)
    seen = []
    for calls in range(1, 200):
        folder = tmp_path / str(calls)
        save(module, None, folder, step=1)
        if (made := _killed(folder, calls)) >= 0:
            assert 5 < made < calls
            break
        resumed = resume(language(), None, folder)
        assert resumed is not None
        seen.append(resumed.step)
        save(module, None, folder, step=3, keep=2)
        assert not list(folder.glob(".*"))
    assert seen == sorted(seen) and set(seen) == {1, 2}


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plain(tmp_path, step=1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_storage, "synchronise", full)
    with pytest.raises(RunError, match=r"cannot be saved: rank 0: .*No space left on device"):
        _plain(tmp_path, step=2)
    monkeypatch.undo()
    resumed = resume(language(), None, tmp_path)
    assert (
        resumed is not None
        and resumed.step == 1
        and sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", LOCK]
    )


def _beside(folder: str) -> list[int]:
    """Saves beside steps hold what was there when they were asked for."""
    module, optimizer = built("zero3", 2)
    train(module, optimizer, range(1))
    save(module, optimizer, f"{folder}/now", step=1)
    first = save(module, optimizer, f"{folder}/beside", step=1, wait=20.0)
    train(module, optimizer, range(1, 3))
    second = save(module, optimizer, f"{folder}/beside", step=3, wait=20.0)
    resumed = resume(module, None, f"{folder}/beside")
    assert resumed is not None and first.done and second.done
    return [first.step, resumed.step]


def test_beside_the_next_steps(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    assert run_ranks(_beside, 2, str(tmp_path)) == [[1, 3]] * 2
    now = find_checkpoint(tmp_path / "now")
    assert now is not None
    one, values = whole(now)
    other, others = whole(tmp_path / "beside" / "step-00000001")
    assert all(
        torch.equal(values[name], others[name]) for name in values if not name.startswith("random")
    )
    assert one.scalars == other.scalars


def test_a_save_takes_over_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Once that one is through; what is saved is what is there now."""
    module = language()
    first = save(module, None, tmp_path, step=1, wait=20.0)
    before = {name: value.data_ptr() for name, value in first._copies.items()}
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    second = save(module, None, tmp_path, step=2, wait=20.0)
    assert {name: value.data_ptr() for name, value in second._copies.items()} == before
    path = second.wait()
    actual = language()
    resume(actual, None, tmp_path)
    assert path.name == "step-00000002" and torch.equal(
        next(actual.parameters()), next(module.parameters())
    )
    smaller = {
        name: value[:1] if value.dim() else value.double() for name, value in second._copies.items()
    }
    assert all(
        value.shape == smaller[name].shape
        for name, value in on_host(smaller, second._copies).items()
    )


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_from_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are under way before they are waited for, once; the memory is pinned once, too."""
    told: list[Any] = []
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        told.append(("room", pin_memory))
        return empty(*shape, **options)

    class Stream:
        def synchronize(self) -> None:
            told.append("synchronised")

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    state: dict[str, torch.Tensor] = {name: torch.arange(3.0).as_subclass(OnGpu) for name in "ab"}
    room = on_host(state, {})
    assert told == [("room", True), ("room", True), "synchronised"] and [
        float(v.sum()) for v in room.values()
    ] == [3.0, 3.0]
    on_host(state, room)
    assert told[3:] == ["synchronised"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extra": object()}, "plain data"),
        ({"step": -1}, "at least 0"),
        ({"keep": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        save(language(), None, tmp_path, **{"step": 1, **options})
    assert not list(tmp_path.iterdir())


def _dies_in_a_save(folder: str, calls: int) -> None:
    """Rank 1 is killed at one of its calls of the file system or of the ranks' messages, while all
    save.
    """
    module, optimizer = built("zero3", 2)
    save(module, optimizer, folder, step=1)
    train(module, optimizer, range(1))
    torch.set_num_threads(1)  # the threads of OpenMP do not come along
    made = 0

    def dying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == calls and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        return call

    checkpoint_storage.os.fsync = dying(os.fsync)  # type: ignore[assignment]
    for name in ("gather_object", "scatter_object_list", "broadcast_object_list"):
        setattr(dist, name, dying(getattr(dist, name)))
    save(module, optimizer, folder, step=2)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_rank_killed_in_a_save(tmp_path: Path, calls: int) -> None:
    plan_of("zero3", 2)
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run_ranks(_dies_in_a_save, 2, str(tmp_path), calls)
    resumed = resume(language(), None, tmp_path)
    assert resumed is not None and resumed.step == 1
    save(language(), None, tmp_path, step=3)
    assert not list(tmp_path.glob(".*"))
