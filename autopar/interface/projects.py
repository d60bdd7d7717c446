"""Files and shardings of other projects in Python, and `train`."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.costmodel import Cluster
from autopar.options.checking import checked
from autopar.options.python_words import python_words
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.integrations.convert import Converted
    from autopar.runtime.verifying import Case, Verdict


@python_words
def convert(
    plan: Plan | str | Path, to: str | None = None, version: str | None = None
) -> Converted:
    """The plan as `text` in the format of the target `to`, and what the target cannot say.

    `to`: "dtensor", "fsdp2", "pipelining", "transformers", "accelerate", "torchtitan", "megatron",
    "megatron-bridge" or "deepspeed", with a version (`torchtitan@0.2`) or without; by default the
    target that the plan was made for.
    `lost`: a sentence for each thing that the target cannot say. What would be another computation
    is a `UsageError`. `version`: of torchtitan, which reads TOML up to 0.2.
    """
    from autopar.integrations.convert import convert as write

    loaded = Plan.of(plan)
    return write(loaded, to or loaded.target, version)


@python_words
def import_plan(
    config: str | Path,
    model: Any,
    example_inputs: Any = None,
    *,
    form: str | None = None,
    values: Mapping[str, str] | None = None,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    memory: float | str | None = None,
    dtype: str | None = None,
    dims: Mapping[str, int] | None = None,
) -> Plan:
    """The plan that a configuration of another project stands for, priced as all plans are.

    `config`: torchtitan's `.toml`, Megatron's arguments, DeepSpeed's `.json`, accelerate's `.yaml`,
    transformers' `DistributedConfig` in Python or its `tp_plan` as `.json`; `form` names the
    project where the file does not show it. `values`: of names that it leaves to its caller, such
    as a script's variables, and its arguments by their
    numbers. What the plan leaves out of it is a warning.
    """
    from autopar.configured import is_configuration, load_any
    from autopar.frontends.huggingface import OPTIONS
    from autopar.frontends.load import options_asked
    from autopar.integrations.importing import Hardware, import_configuration, read_configuration

    configuration = read_configuration(str(config), form, values)
    sequence = {} if configuration.sequence is None else {OPTIONS["seq"]: configuration.sequence}
    read = options_asked(
        batch=configuration.global_batch(devices),
        dtype=dtype or configuration.dtype,
        precision=configuration.precision,
        dims={**(sequence if is_configuration(model) else {}), **(dims or {})},
    )
    hardware = Hardware(devices=devices, cluster=cluster, **checked({"memory": memory}))
    loaded = load_any(model, read, example_inputs)
    imported = import_configuration(configuration, loaded, hardware, compare=False)
    for sentence in configuration.lost:
        warnings.warn(f"{configuration.source}: {sentence}", stacklevel=3)
    return imported.planned.plan


@python_words
def verify(case: str | Mapping[str, Any] | Case, ranks: int | None = None) -> Verdict:
    """Execute a sharding that someone else wrote on forked ranks, and name what is wrong.

    `case`: a dict of `module`, `inputs`, `parallelize(module, mesh)`, and perhaps `mesh` and
    `loss(outputs, *inputs)`; or `package.module:function`, which returns one.
    """
    from autopar.runtime.verifying import Case, case_named, made_case
    from autopar.runtime.verifying import verify as executed

    if isinstance(case, str):
        case = case_named(case, ranks)
    return executed(case if isinstance(case, Case) else made_case("the case", case, ranks))


@python_words
def train(
    config: str | Path,
    *,
    ranks: int | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
) -> None:
    """Train a model as a `.toml` file says, resuming by itself (docs/training.md).

    `ranks`, `steps`, `folder`: overrule the file. Under `torchrun` every rank calls it.
    """
    from autopar.training.command import train as run

    run(argparse.Namespace(config=str(config), ranks=ranks, steps=steps, folder=folder))
