"""`autopar.what_if`: the plan under changed conditions, in words and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.analysis.searches.what_if import Changes, ModelSource, replan
from autopar.api import Planned
from autopar.costmodel import Cluster
from autopar.options.python_words import python_words
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import bytes_text, seconds_text

from .page.difference import difference_tables
from .printing import Table, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan, the conditions `asked` in words, and the plan found under them."""

    plan: Plan
    asked: tuple[str, ...]
    planned: Planned

    @property
    def other(self) -> Plan:
        """The plan found."""
        return self.planned.plan

    def summary(self) -> str:
        """The answer in a sentence or two."""
        here = self.plan.predicted
        there = self.other.predicted
        times = "not comparable"
        if here.step > 0:
            times = f"{there.step / here.step:.2f} times as long"
        return (
            f"With {', '.join(self.asked) or 'nothing changed'}, a step takes "
            f"{seconds_text(there.step)}, {times} as the plan's {seconds_text(here.step)}, and "
            f"needs {bytes_text(there.memory)} where the plan needs {bytes_text(here.memory)}. "
            f"{self._strategies()}"
        )

    def _strategies(self) -> str:
        """A sentence about what becomes of the strategies."""
        if (
            self.other.operators == self.plan.operators
            and self.other.mesh == self.plan.mesh
            and self.other.stages == self.plan.stages
        ):
            return "The strategies stay as they are."
        train = self.other.model.mode == "train"
        named = scheme_of(self.other, analyse(self.planned.model.graph, train=train))
        return f"The best plan is then {named.called}."

    def tables(self) -> tuple[Table, ...]:
        """Figures side by side, and differences in splits and storage."""
        return difference_tables(self.plan, self.other)

    def __repr__(self) -> str:
        here = self.plan.predicted.step
        there = self.other.predicted.step
        return f"WhatIf({', '.join(self.asked)}: {here:.4g} s -> {there:.4g} s a step)"

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *map(plain, self.tables())])


@python_words
def what_if(
    plan: Plan,
    model: Any,
    example_inputs: Any = None,
    *,
    memory: float | str | None = None,
    links: Mapping[str, float | str] | None = None,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    target: str | None = None,
    batch: int | None = None,
    keep: bool = False,
    loss: str | Callable[..., Any] | None = None,
    trust: bool = False,
    progress: Progress | None = None,
    **pinned: Any,
) -> WhatIf:
    """Plan the model of `plan` again under changed conditions, and compare the two plans.

    `memory`: bytes per device, or a text such as "40GiB". `links`: by level of the cluster a factor
    (0.5, "2x") or a bandwidth ("100GB/s"). `devices`, `cluster`, `target`, `batch`: replace
    those of the plan. `pinned`: choices to fix, as for `autopar.plan`: `pins`, `scheme`, `mesh`,
    `stages`, `micro_batches`, `recompute`, `zero`, `offload`, `schedule`, `interleave`. `keep`:
    whether the plan's own choices of these stay where `pinned` has none; otherwise all is searched
    again.
    Raises the errors of `autopar.errors`.
    """
    source = ModelSource(model=model, example_inputs=example_inputs, loss=loss, trust=trust)
    changes = Changes(
        memory=memory,
        links=links or {},
        devices=devices,
        cluster=cluster,
        target=target,
        batch=batch,
        fixed=pinned,
        keep=keep,
    )
    planned = replan(plan, source, changes, progress)
    return WhatIf(plan=plan, asked=tuple(_in_words(changes)), planned=planned)


def _in_words(changes: Changes) -> Iterator[str]:
    """The changed conditions, in words."""
    if changes.memory is not None:
        yield f"{_memory_text(changes.memory)} of memory"
    for name, value in changes.links.items():
        yield f"{name} at {value if isinstance(value, str) else f'{value:g}x'}"
    if changes.devices is not None:
        yield f"{changes.devices} devices"
    if changes.cluster is not None:
        yield f"cluster {_cluster_text(changes.cluster)}"
    if changes.target is not None:
        yield f"target {changes.target}"
    if changes.batch is not None:
        yield f"a batch of {changes.batch}"
    for name, value in changes.fixed.items():
        if value is not None and value != () and value != []:
            yield f"{name.replace('_', ' ')} {_value_text(value)}"
    if changes.keep:
        yield "the rest of the outer choices as planned"


def _cluster_text(cluster: str | Path | Cluster) -> str:
    return cluster.name if isinstance(cluster, Cluster) else str(cluster)


def _memory_text(memory: float | str) -> str:
    return memory if isinstance(memory, str) else bytes_text(memory)


def _value_text(value: object) -> str:
    """A value as text; the members of a list with commas."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
