"""`elastic`: a training that is planned, built and resumed for the present ranks.

It is saved while it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.errors import PlanError, RunError, UsageError, unknown

from .replanning import Replanned, plan_for

if TYPE_CHECKING:
    import torch

    from autopar.model import LoadedModel
    from autopar.plan import Plan
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.runtime.training.resuming import Resumed
    from autopar.runtime.training.sampling import ResumableSampler

Tracked = TypeVar("Tracked")
LOCAL = "local-cpu"
PLANNING = (
    "cluster",
    "master",
    "reduce",
    "search",
    "memory",
    "pins",
    "scheme",
    "mesh",
    "stages",
    "micro_batches",
    "recompute",
    "zero",
    "offload",
    "schedule",
    "interleave",
    "discover",
    "replicate_unknown",
)
"""Options of `autopar.plan` that `planning` may hold. Of the model they are arguments of `elastic`.
"""


class Training:
    """A training under way.

    `module`, `optimizer`, `sampler` and `plan` on the present ranks, after `step` steps.
    """

    def __init__(
        self,
        folder: Path,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        sampler: ResumableSampler | None,
        replanned: Replanned,
    ) -> None:
        self.folder = folder
        self.module = module
        self.optimizer = optimizer
        self.sampler = sampler
        self.plan: Plan = replanned.plan
        self.replanned = replanned
        self.step = 0
        self.resumed: Resumed | None = None
        self._tracked: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._saved: int | None = None
        self._keep = 2
        self._wait: float | None = None
        self._allow_nonfinite = False
        self.require_savable: Callable[[], None] = lambda: None
        """Called in front of every save; raises where nothing may be saved."""

    def track(self, name: str, tracked: Tracked) -> Tracked:
        """Save the state of an object with a plain `state_dict` from now on, and restore it now.

        Such objects are schedulers and gradient scalers.

        A scheduler sets the learning rate when it is made; the optimizer keeps the resumed one.
        """
        if name in self._tracked:
            raise UsageError(f"{name!r} is tracked already")
        self._tracked[name] = tracked
        extra = self.resumed.extra if self.resumed is not None else {}
        if name in extra:
            tracked.load_state_dict(extra[name])  # type: ignore[attr-defined]
            for group, saved in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update(saved)
        elif extra:
            raise PlanError(
                f"the checkpoint {self.resumed and self.resumed.path}: "
                + unknown("tracked state", name, extra)
            )
        return tracked

    def steps(
        self,
        count: int,
        loader: Iterable[Any] | None = None,
        *,
        save_every: int | None = None,
        keep: int = 2,
        wait: float | None = 60.0,
        grace: float = 25.0,
        allow_nonfinite: bool = False,
    ) -> Iterator[Any]:
        """The remaining steps of `count`.

        Yields their numbers, or with a `loader` over `sampler` pairs of number and batch.

        A checkpoint is saved after every `save_every` steps, after the last one and at SIGTERM;
        `keep`, `wait` and `allow_nonfinite` are as for `autopar.save`.
        """
        from autopar.runtime.training.stopping import steps

        if save_every is not None and save_every < 1:
            raise UsageError(f"save_every is {save_every}; it is at least 1")
        if loader is not None and self.sampler is None:
            raise UsageError(
                "a loader needs the sampler of this training: give elastic(..., data=dataset)"
            )
        self._keep = keep
        self._wait = wait
        self._allow_nonfinite = allow_nonfinite
        batches = None
        if loader is not None and self.sampler is not None:
            batches = self.sampler.counted(loader, endless=True)
        for step in steps(self.step, count, self._stopped, grace=grace):
            yield step if batches is None else (step, next(batches))
            self.step = step + 1
            if self.step == count or (save_every is not None and self.step % save_every == 0):
                self.save()

    def save(self) -> None:
        """Save now, after `step` steps."""
        from autopar.runtime.training.saving import save

        self.require_savable()
        extra = {name: tracked.state_dict() for name, tracked in self._tracked.items()}
        save(
            self.module,
            self.optimizer,
            self.folder,
            step=self.step,
            sampler=self.sampler,
            extra=extra,
            keep=self._keep,
            wait=self._wait,
            allow_nonfinite=self._allow_nonfinite,
        )
        self._saved = self.step

    def _stopped(self, done: int) -> None:
        self.step = done
        if self._saved != done:
            self.save()

    def _resume(self) -> None:
        from autopar.runtime.training.resuming import resume

        self.resumed = resume(self.module, self.optimizer, self.folder, sampler=self.sampler)
        if self.resumed is not None:
            self.step = self.resumed.step
            self._groups = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ]


def elastic(
    model: Any,
    example_inputs: Any = None,
    folder: str | Path = "",
    *,
    optimizer: Callable[[ParallelModule], torch.optim.Optimizer],
    data: Sized | int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    batch: int | None = None,
    dtype: str | None = None,
    loss: str | Callable[..., Any] | None = None,
    optimizer_name: str = "adamw",
    backend: str | None = None,
    timeout: float = 600.0,
    weights: str | Path | None = None,
    trust: bool = False,
    **planning: Any,
) -> Training:
    """A training of `model` on the present ranks, resumed if `folder` has a checkpoint.

    Every rank calls this, whether started by `torchrun` (with `--max-restarts`, on any number of
    machines) or alone. A plan for this number of ranks in `folder` is used again. Otherwise rank 0
    searches one, keeping strategies of a plan for another number. Ranks that keep failing by
    themselves are left out (`autopar.runtime.launch.failing_ranks`).

    `model`, `example_inputs`, `batch`, `dtype`, `loss`, `trust`: as for `autopar.plan`. `folder`:
    checkpoints and plans, visible to all ranks. `optimizer`: makes the module's optimizer;
    `optimizer_name`: the optimizer that is planned for. `data`: the dataset, or its length, for
    `Training.sampler`, which draws by `seed`, or in order without `shuffle`. `timeout`: seconds
    that a rank may be late to a collective. `weights`: the weights that a new training begins with.
    `planning`: other options of `autopar.plan`.
    """
    place = _folder(folder, planning)
    import torch

    from autopar.runtime.launch import default_backend
    from autopar.runtime.training.sampling import sampler

    backend = backend or default_backend()
    if backend == "gloo":
        planning.setdefault("cluster", LOCAL)
    planning["optimizer"] = optimizer_name
    _join(place, backend, timeout)
    loaded = _load(model, example_inputs, batch=batch, dtype=dtype, loss=loss, trust=trust)
    replanned = _planned_together(loaded, place, planning)
    from autopar.api import parallelize

    module = parallelize(loaded, replanned.plan, loss=loss, backend=backend, weights=weights)
    own = (
        sampler(data, module, batch=batch, seed=seed, shuffle=shuffle) if data is not None else None
    )
    torch.manual_seed(seed)
    training = Training(place, module, optimizer(module), own, replanned)
    training._resume()
    _say(training)
    return training


def _folder(folder: str | Path, planning: dict[str, Any]) -> Path:
    """The folder of the training; checks it and the options before ranks wait for one another."""
    if not str(folder):
        raise UsageError("elastic needs a folder for checkpoints and plans, which all ranks see")
    for name in planning:
        if name not in PLANNING:
            raise UsageError(unknown("option of planning", name, PLANNING))
    return Path(folder).absolute()


def _join(folder: Path, backend: str, timeout: float) -> None:
    """Be one of the ranks that a launcher has started.

    A process that is one already, or that runs alone, stays as it is.
    """
    import torch.distributed as dist

    from autopar.runtime.launch import Lives, init_alone, init_from_environment, launched

    if dist.is_initialized():
        return
    if launched() is None:
        init_alone(backend)
        return
    from autopar.runtime.training.latest import LATEST

    latest = folder / LATEST
    progress = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    lives = Lives(folder, progress) if "TORCHELASTIC_RUN_ID" in os.environ else None
    init_from_environment(backend, timeout=timeout, lives=lives)


def _load(model: Any, example_inputs: Any, **options: Any) -> LoadedModel:
    from autopar.configured import load_any
    from autopar.frontends.load import ModelOptions
    from autopar.model import LoadedModel

    if isinstance(model, LoadedModel):
        return model
    return load_any(model, ModelOptions(train=True, **options), example_inputs)


def _planned_together(loaded: LoadedModel, folder: Path, planning: dict[str, Any]) -> Replanned:
    """The plan that rank 0 finds, on every rank; where it finds none, every rank says why."""
    import torch.distributed as dist

    from autopar.plan import Plan
    from autopar.runtime.training.folder_lock import hold

    devices = dist.get_world_size()
    if devices == 1:
        hold(folder)
        return plan_for(loaded, devices, folder, planning)
    told: list[Any] = ["", None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            hold(folder)
            replanned = plan_for(loaded, devices, folder, planning)
            told = ["", (replanned.plan.to_json(), replanned.origin, replanned.seconds)]
        except Exception as error:
            told = [str(error) or type(error).__name__, None]
            failure = error
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0]:
        raise RunError(f"rank 0 cannot take part: {told[0]}")
    text, origin, seconds = told[1]
    return Replanned(plan=Plan.model_validate_json(text), origin=origin, seconds=seconds)


def _say(training: Training) -> None:
    import torch.distributed as dist

    if dist.get_rank() != 0:
        return
    replanned = training.replanned
    began = f"goes on after {training.step} steps" if training.resumed is not None else "begins"
    ranks = "1 rank" if dist.get_world_size() == 1 else f"{dist.get_world_size()} ranks"
    plan = f"the plan for {replanned.plan.mesh_} was {replanned.origin} ({replanned.seconds:.2f} s)"
    print(f"autopar: the training {began} on {ranks}; {plan}", file=sys.stderr, flush=True)
