"""The work of each rank of `autopar train`.

It makes model, data, optimizer and schedule from the file, and the steps.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import UsageError

from .config import Config, OptimizerTable, ScheduleTable
from .elastic import Training, elastic
from .finite import Finite
from .metrics import Metrics, Predicted, Reported, memory_warning

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from autopar.frontends.huggingface import Configured
    from autopar.model import LoadedModel
    from autopar.runtime.module.parallel_module import ParallelModule


TOKENS = "input_ids"
"""The argument that a file of tokens is for."""


def train(config: Config) -> int:
    """Train up to the last step; the number of steps that this life has made.

    Every rank calls this.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    table = config.training
    torch.manual_seed(table.seed)
    model = model_of(config)
    data = _dataset(config, model)
    before = _resident()
    run = elastic(
        model,
        folder=table.folder,
        optimizer=partial(_optimizer, config.optimizer),
        data=data,
        seed=table.seed,
        shuffle=config.data.shuffle,
        batch=config.data.batch,
        backend=table.backend,
        timeout=table.timeout,
        weights=config.model.weights,
        **{**config.plan, "optimizer_name": config.optimizer.name},
    )
    others = _others_memory(run.module.engine.device, before)
    if table.compile:
        run.module.compile()
    schedule = run.track(
        "schedule",
        torch.optim.lr_scheduler.LambdaLR(
            run.optimizer, partial(rate, config.schedule, table.steps)
        ),
    )
    loader: Any = DataLoader(
        cast(Any, data), batch_sampler=run.sampler, num_workers=config.data.workers
    )
    # One rank speaks for all.
    metrics = _metrics(config, run, speaks=not dist.is_initialized() or dist.get_rank() == 0)
    finite = Finite(run, table.skip_nonfinite, allowed=table.allow_nonfinite)
    run.require_savable = finite.require
    first = run.step
    for step, batch in run.steps(
        table.steps,
        loader,
        save_every=table.save_every,
        keep=table.keep,
        allow_nonfinite=table.allow_nonfinite,
    ):
        metrics.begin()
        loss, norm = _step(run, batch, config.optimizer.clip, finite)
        learning_rate = schedule.get_last_lr()[0]
        schedule.step()
        metrics.took()
        if metrics.wanted(step + 1):
            finite.require()
            figures = {"loss": float(loss), "lr": float(learning_rate)}
            if norm is not None:
                figures["gradient_norm"] = float(norm)
            metrics.end(step + 1, figures, _memory(run.module, others))
        if step == first:
            _warn_of_memory(run, others)
    return run.step - first


def _step(
    run: Training, batch: Any, clip: float | None, finite: Finite
) -> tuple[Tensor, Tensor | None]:
    """One step on a batch: the loss, and the norm of the gradients where they are clipped."""
    run.optimizer.zero_grad()
    given = _arguments(run.module, batch)
    loss = run.module.loss(**given) if isinstance(given, Mapping) else run.module.loss(*given)
    norm = None
    if finite.allows(loss.detach()):
        loss.backward()  # type: ignore[no-untyped-call]
        norm = run.module.clip_grad_norm_(clip) if clip is not None else None
        run.optimizer.step()
    return loss.detach(), norm


def _arguments(module: ParallelModule, batch: Any) -> Any:
    """The arguments that a batch is: tokens are a causal language model's inputs and its labels."""
    import torch

    device = module.engine.device
    if isinstance(batch, torch.Tensor):
        own = batch.to(device)
        return {TOKENS: own, "labels": own}
    if isinstance(batch, Mapping):
        return {name: value.to(device) for name, value in batch.items()}
    return tuple(value.to(device) for value in batch)


# --- out of the file ---


def named_callable(text: str, key: str) -> Callable[[], Any]:
    """The function that `package.module:function` names."""
    module, _, name = text.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise UsageError(f"{key}: {text!r}: {module} cannot be imported: {error}") from error
    if not callable(function):
        raise UsageError(f"{key}: {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def model_of(config: Config) -> LoadedModel:
    """The model; a configuration's weights are those of files, or drawn by the seed."""
    from autopar.configured import frozen, load_any, load_configured
    from autopar.frontends.huggingface import SEQUENCE
    from autopar.frontends.load import ModelOptions

    table = config.model
    options = ModelOptions(train=True, batch=config.data.batch, dtype=table.dtype)
    if table.callable is not None:
        module, example = named_callable(table.callable, "model.callable")()
        return load_any(frozen(module, table.frozen), options, example)
    dims = {} if config.data.sequence is None else {SEQUENCE: config.data.sequence}
    return load_configured(
        str(table.config),
        replace(options, dims=dims),
        frozen_parameters=table.frozen,
        build=partial(_with_weights, config),
    )


def _with_weights(config: Config, made: Configured) -> torch.nn.Module:
    """The module of a configuration, on the meta device if other files hold its weights."""
    from autopar.api import parameters_on_meta

    if config.model.weights is not None:
        with parameters_on_meta():
            module = made.fresh()
    else:
        module = made.build(config.training.seed)
    return cast("torch.nn.Module", module)


def _dataset(config: Config, model: LoadedModel) -> Sized:
    from autopar.runtime.models.example_inputs import rows_looked_up
    from autopar.runtime.training.tokens import tokens

    table = config.data
    if table.callable is not None:
        dataset = named_callable(table.callable, "data.callable")()
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"data.callable: {table.callable} returned a {type(dataset).__name__}, which is no "
                "dataset with a length"
            )
        return dataset  # type: ignore[no-any-return]
    assert table.tokens is not None and table.sequence is not None
    limit = rows_looked_up(model.graph).get(TOKENS)
    return tokens(table.tokens, table.sequence, type=table.type, limit=limit)


def _optimizer(table: OptimizerTable, module: ParallelModule) -> torch.optim.Optimizer:
    """The optimizer of a planned module; norms and biases do not decay."""
    import torch

    import autopar

    if table.name == "muon":
        return _muon(table, module)
    momentum = 0.9 if table.momentum is None else table.momentum
    own = [value for value in module.parameters() if value.requires_grad]
    # Every rank has both groups, even if a stage has no parameters for one: a checkpoint compares
    # their number.
    groups = [
        {"params": [value for value in own if value.dim() > 1], "weight_decay": table.weight_decay},
        {"params": [value for value in own if value.dim() <= 1], "weight_decay": 0.0},
    ]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": table.betas}),
        "sgd": (torch.optim.SGD, {"momentum": 0.0}),
        "momentum": (autopar.Momentum, {"momentum": momentum}),
        "lamb": (autopar.Lamb, {"betas": table.betas}),
    }
    kind, options = kinds[table.name]
    made = autopar.local_optimizer(kind, groups, lr=table.lr, **options)
    placed: torch.optim.Optimizer = autopar.host_states(made, module)
    return placed


def _muon(table: OptimizerTable, module: ParallelModule) -> torch.optim.Optimizer:
    """Muon, whose matrices take the learning rate and the decay of all other parameters."""
    import autopar

    made: torch.optim.Optimizer = autopar.Muon(
        module,
        table.lr,
        table.weight_decay,
        0.95 if table.momentum is None else table.momentum,
        adjust_lr_fn="match_rms_adamw",
        others={"betas": table.betas},
    )
    vectors = made.param_groups[-1]
    vectors["weight_decay"] = 0.0
    return made


def rate(table: ScheduleTable, steps: int, step: int) -> float:
    """The share of the learning rate in a step.

    >>> table = ScheduleTable(name="linear", warmup=2, final=0.5)
    >>> [rate(table, 6, step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    """
    if step < table.warmup:
        return (step + 1) / table.warmup
    if table.name == "constant":
        return 1.0
    done = min(1.0, (step - table.warmup) / max(1, steps - table.warmup))
    left = 1 - done if table.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return table.final + (1 - table.final) * left


# --- figures ---


def _metrics(config: Config, run: Training, *, speaks: bool) -> Metrics:
    figures = run.plan.predicted
    predicted = Predicted(seconds=figures.step, memory=figures.memory, parts=figures.memory_parts)
    tokens = None
    if config.data.sequence is not None:
        tokens = config.data.batch * config.data.sequence
    reported = Reported(
        folder=Path(config.training.folder),
        done=run.step,
        count=config.training.steps,
        every=config.training.log_every,
        tokens=tokens,
    )
    return Metrics(reported, predicted, speaks=speaks)


def _resident() -> int:
    """The most bytes of this process so far."""
    # Windows, where training is refused, has no such module.
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _others_memory(device: torch.device, before: int) -> int:
    """Bytes that are not the training's: workspaces of a GPU's libraries, else those `before`."""
    import torch

    if device.type != "cuda":
        return before
    allocated = torch.cuda.memory_allocated(device)
    # The first product of a thread makes a workspace; backward passes have a thread of their own.
    x = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    del x
    return torch.cuda.memory_allocated(device) - allocated


def _memory(module: ParallelModule, others: int) -> float:
    """The device's peak in bytes without `others`: allocated on a GPU, resident on a CPU."""
    import torch

    device = module.engine.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()
    return float(peak - others)


def _warn_of_memory(run: Training, others: int) -> None:
    """After the first step, warn of more memory than predicted.

    A CPU's figure is too rough for that.
    """
    if run.module.engine.device.type != "cuda":
        return
    stage = run.module.engine.world.stage
    figures = run.plan.predicted
    memory = (
        run.plan.stages[stage].memory if run.plan.stages and stage is not None else figures.memory
    )
    predicted = Predicted(seconds=figures.step, memory=memory, parts=figures.memory_parts)
    where = f"rank {run.module.engine.world.rank}" + (
        f" (stage {stage})" if run.plan.stages else ""
    )
    if said := memory_warning(_memory(run.module, others), predicted, where):
        print(f"autopar: {said}", file=sys.stderr, flush=True)
