"""The file of `autopar train`: TOML.

Each key is checked, and an unknown one is refused with the valid names.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import UsageError, unknown
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import read_text

from .elastic import PLANNING

OPTIMIZERS = ("adamw", "sgd", "momentum", "lamb", "muon")
_CALLABLE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
Callable_ = Annotated[str, Field(pattern=_CALLABLE)]
Positive = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    """A table with only the named keys, which takes no text in place of a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelTable(_Table):
    """The model: a Hugging Face configuration, or a callable that returns (module, example inputs).

    `weights`: safetensors files that a new training begins with. `dtype`: the type in which the
    model computes.
    """

    config: str | None = None
    callable: Callable_ | None = None
    weights: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None
    frozen: tuple[str, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _one(self) -> ModelTable:
        if (self.config is None) == (self.callable is None):
            raise ValueError("give either config or callable")
        return self


class DataTable(_Table):
    """The data: a file of tokens in windows of `sequence`, or a callable that returns a dataset.

    `type`: the number type of a file other than .npy; a text of bytes is uint8.
    """

    tokens: str | None = None
    callable: Callable_ | None = None
    type: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    sequence: Positive | None = None
    batch: Positive
    shuffle: bool = True
    workers: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one(self) -> DataTable:
        if (self.tokens is None) == (self.callable is None):
            raise ValueError("give either tokens or callable")
        if self.tokens is not None and self.sequence is None:
            raise ValueError("tokens need a sequence: how many make a sample")
        return self


class OptimizerTable(_Table):
    """The optimizer. Weight decay applies to matrices only.

    `clip`: the largest norm of all gradients. `betas`: of AdamW, also beside Muon. `momentum`: of
    SGD and Muon (None: 0.9 and 0.95).
    """

    name: Literal["adamw", "sgd", "momentum", "lamb", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0, strict=False)]
    weight_decay: Annotated[float, Field(ge=0, strict=False)] = 0.0
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    momentum: Annotated[float, Field(ge=0, lt=1, strict=False)] | None = None
    clip: Annotated[float, Field(gt=0, strict=False)] | None = None


class ScheduleTable(_Table):
    """The learning rate over the steps.

    It rises for `warmup` steps, then falls to `final` times the peak, or stays.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    final: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0


class TrainingTable(_Table):
    """Length of the training, and where checkpoints and logs go."""

    folder: str
    steps: Positive
    save_every: Positive = 500
    keep: Positive = 2
    log_every: Positive = 10
    skip_nonfinite: Annotated[int, Field(ge=0)] = 0
    allow_nonfinite: bool = False
    seed: int = 0
    ranks: Positive | None = None
    backend: Literal["gloo", "nccl"] | None = None
    timeout: Annotated[float, Field(gt=0, strict=False)] = 600.0
    compile: bool = False


class Config(_Table):
    """All of the file; `plan` has options of `autopar.plan`."""

    model: ModelTable
    data: DataTable
    optimizer: OptimizerTable
    schedule: ScheduleTable = ScheduleTable()
    training: TrainingTable
    plan: dict[str, Any] = {}


def load_config(path: str | Path) -> Config:
    """Read the file; paths in it are relative to its folder.

    Whatever is wrong is a `UsageError` that names the key.
    """
    path = Path(path)
    text = read_text(path, CONFIGURATION_BYTES, what="file of a training", error=UsageError)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no TOML: {error}") from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UsageError(
            "\n  ".join([f"{path}:", *(_words(dict(one)) for one in error.errors()[:10])])
        ) from error
    for name in config.plan:
        if name not in PLANNING:
            raise UsageError(f"{path}: plan: " + unknown("key", name, PLANNING))
    return _absolute(config, path.absolute().parent)


def _words(error: dict[str, Any]) -> str:
    where = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        table: Any = Config
        for part in where[:-1]:
            table = table.model_fields[part].annotation
        return f"{'.'.join(where[:-1]) or 'the file'}: " + unknown(
            "key", where[-1], table.model_fields
        )
    if error["type"] == "missing":
        return f"{'.'.join(where)}: is missing"
    text = re.sub(r"^Value error, ", "", error["msg"])
    if error["type"] == "string_pattern_mismatch":
        text = f"{error['input']!r} is not of the form package.module:function"
    return f"{'.'.join(where)}: {text}"


def _absolute(config: Config, folder: Path) -> Config:
    """The configuration with paths that hold in any working directory."""

    def at(text: str | None) -> str | None:
        return None if text is None else str(folder / Path(text).expanduser())

    model = config.model.model_copy(
        update={"config": at(config.model.config), "weights": at(config.model.weights)}
    )
    data = config.data.model_copy(update={"tokens": at(config.data.tokens)})
    training = config.training.model_copy(update={"folder": at(config.training.folder)})
    return config.model_copy(update={"model": model, "data": data, "training": training})
