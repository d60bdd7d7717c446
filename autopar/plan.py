"""`Plan`: the strategy checkpoint, its file, and its match with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_serializer, field_validator

from .errors import PlanError
from .ir import Graph, Tensor
from .order.execution import Execution, execution
from .order.plan_on_mesh import Decided, PlanOnMesh, named_decision
from .order.schedules import SCHEDULES, schedule_named
from .order.stages import Pipelined, staged_execution
from .outputs import write_whole
from .plan_file import read_plan_file
from .plan_matching import differences
from .plan_parts import (
    AxisSpec,
    CollectivePlan,
    ModelSpec,
    OperatorPlan,
    ParameterPlan,
    Part,
    Predicted,
    Provenance,
    RegionPlan,
    RoutingPlan,
    RulePlan,
    SchedulePlan,
    StagePlan,
    by_region,
    in_order,
    mesh_of,
)
from .sharding.analysis import Analysis
from .sharding.candidates import cuts_no_byte, is_storable
from .sharding.layout import Kind, Layout, R, format_layout, is_valid, parse_layout
from .sharding.mesh import Mesh
from .sharding.program import Assignment, Decision, Program
from .sharding.program_builder import build_program


class Plan(Part):
    """All strategies of a model on a mesh, with the predicted costs.

    `target`: the project that runs it. `framework`: whose habits are priced, with those of
    `habits` in place of its own. `mesh`: of all devices, or of each stage's devices if there are
    `stages` (a single stage is not listed). `unused`: idle devices of the cluster.
    `redistributions`: for every tensor the chains of layouts that bring it to its readers. `rules`:
    rules found for this model, not taken from the table. `replicated`: operator kinds without a
    rule, computed whole on every device.
    `routing`: of tokens to experts, where ranks split them.
    """

    schema_: Literal["autopar-plan"] = Field(default="autopar-plan", alias="schema")
    version: Literal[4] = 4
    model: ModelSpec
    cluster: str
    target: str = "autopar"
    framework: str = "autopar"
    habits: dict[str, bool | float | str | tuple[str, ...] | None] = Field(default_factory=dict)
    mesh: tuple[AxisSpec, ...]
    operators: dict[str, OperatorPlan]
    parameters: dict[str, ParameterPlan]
    outputs: dict[str, str]
    redistributions: dict[str, tuple[tuple[str, ...], ...]]
    collectives: tuple[CollectivePlan, ...] = ()
    rules: tuple[RulePlan, ...] = ()
    replicated: tuple[str, ...] = ()
    schedule: SchedulePlan = SchedulePlan()
    stages: tuple[StagePlan, ...] = ()
    unused: int = Field(default=0, ge=0)
    routing: RoutingPlan | None = None
    predicted: Predicted
    provenance: Provenance

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True
    )

    @field_validator("operators", mode="before", json_schema_input_type=dict[str, RegionPlan])
    @classmethod
    def _operators_of_file(cls, regions: object) -> object:
        return in_order(regions)

    @field_serializer("operators")
    def _regions_of_file(self, operators: dict[str, OperatorPlan]) -> dict[str, RegionPlan]:
        return by_region(operators)

    @field_validator("mesh")
    @classmethod
    def _axes_are_distinct(cls, mesh: tuple[AxisSpec, ...]) -> tuple[AxisSpec, ...]:
        mesh_of(mesh)
        return mesh

    def __repr__(self) -> str:
        """Model, mesh and seconds of a step, not its thousands of operators."""
        mesh = " x ".join(f"{axis.name}={axis.size}" for axis in self.mesh) or "one device"
        stages = f"{len(self.stages) // self.schedule.interleave} stages of " if self.stages else ""
        return (
            f"Plan({self.model.name!r}, {self.model.mode}, {stages}{mesh} of {self.cluster}, "
            f"{self.predicted.step:.4g} s a step)"
        )

    __str__ = __repr__

    @property
    def devices(self) -> int:
        """Number of devices (ranks) that the plan uses."""
        stages = self.stages[: len(self.stages) // self.schedule.interleave]
        return sum(stage.devices for stage in stages) if stages else self.mesh_.devices

    @property
    def mesh_(self) -> Mesh:
        """The mesh (of a stage)."""
        return mesh_of(self.mesh)

    def to_json(self) -> str:
        """The plan as the text of its file; equal plans give equal text."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the strategy checkpoint, whole or not at all."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def of(cls, plan: Plan | str | Path) -> Plan:
        """The plan itself, or the one in a file."""
        return plan if isinstance(plan, Plan) else cls.load(plan)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a strategy checkpoint; `PlanError` with the fault for any other file."""
        try:
            return cls.model_validate(read_plan_file(Path(path)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PlanError(
                f"{path}: not a valid plan: {where}: {first['msg']} ({error.error_count()} "
                "problems in all)"
            ) from error

    def summary(self) -> str:
        """Times and memory of the plan, in lines with units."""
        import autopar

        return str(autopar.summary(self))

    def _repr_html_(self) -> str:
        import autopar

        return str(autopar.summary_html(self))

    def what_if(self, model: Any, example_inputs: Any = None, **asked: Any) -> Any:
        """The best plan under changed conditions, compared with this one.

        `autopar.what_if(self, model, ...)`.
        """
        import autopar

        return autopar.what_if(self, model, example_inputs, **asked)

    def differences(self, graph: Graph) -> list[str]:
        """The differences between the plan and a model, in words; empty if it matches."""
        return differences(graph, self.model, self.parameters, self.operators)

    def require_match(self, graph: Graph) -> None:
        """Raise a `PlanError` that lists the differences unless the plan is for this model."""
        sentences = self.differences(graph)
        if not sentences:
            return
        if len(sentences) > 20:
            sentences[20:] = [f"and {len(sentences) - 20} more"]
        shown = "\n  ".join(sentences)
        raise PlanError(
            f"the plan (for {self.model.name}) does not match the model (--reuse keeps what "
            f"matches):\n  {shown}"
        )

    def assignment(self, analysis: Analysis) -> Assignment:
        """The plan's decisions for a matching model."""
        mesh = self.mesh_
        decisions = {}
        for op in analysis.graph.operators:
            if op.name in analysis.cold:
                decisions[op.name] = Decision.cold(op, len(mesh.axes))
            else:
                decisions[op.name] = self._decision(op.name, analysis, mesh)
        decided = self._decided(analysis)
        leaving = {
            name: layout for name, layout in decided.outputs.items() if name in analysis.outputs
        }
        for name, layout in (*decided.storage.items(), *leaving.items()):
            if not is_valid(layout, analysis.graph.tensors[name].shape, mesh.shape):
                raise PlanError(
                    f"the plan stores {name!r} as [{format_layout(layout)}], which does not fit "
                    "its shape"
                )
            self._require_storable(analysis.graph.tensors[name], layout, mesh)
        chains = decided.chains
        if analysis.ends or not self._is_of(analysis.graph):
            # Other modes of the model have gradients, or uses of values, that the plan has not.
            on_mesh = PlanOnMesh(analysis=analysis, decided=decided, mesh=mesh)
            operators = analysis.graph.operators
            chains = on_mesh.chains(operators, decisions, decided.storage, leaving)
        return Assignment(
            mesh=mesh,
            decisions=decisions,
            storage=decided.storage,
            outputs=leaving,
            chains=chains,
            gradients=analysis.gradients,
            host=decided.host,
            matrices=decided.matrices,
        )

    def _require_storable(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> None:
        if any(p != R and p.kind is not Kind.SPLIT for p in layout) or not is_storable(
            layout, mesh.shape
        ):
            raise PlanError(
                f"the plan stores {tensor.name!r} as [{format_layout(layout)}]; what is stored is "
                "whole or split on each axis"
            )
        if not cuts_no_byte(tensor, layout, mesh.shape):
            raise PlanError(
                f"the plan stores {tensor.name!r} as [{format_layout(layout)}], which cuts bytes "
                f"of its copy with {tensor.narrow.bits if tensor.narrow else 8} bits"
            )

    def _decided(self, analysis: Analysis) -> Decided:
        """The decisions in the file, as layouts and chains."""
        try:
            storage = {
                name: parse_layout(parameter.storage) for name, parameter in self.parameters.items()
            }
            outputs = {name: parse_layout(text) for name, text in self.outputs.items()}
            chains = {
                name: tuple(tuple(map(parse_layout, chain)) for chain in texts)
                for name, texts in self.redistributions.items()
            }
        except ValueError as error:
            raise PlanError(f"the plan holds a bad layout: {error}") from error
        self._require_layouts(analysis, storage, outputs)
        return Decided(
            decide=lambda name, mesh: self._decision(name, analysis, mesh),
            storage=storage,
            outputs=outputs,
            chains=chains,
            host=self._in_host_memory(analysis),
            matrices=analysis.updated_whole(self.model.optimizer),
        )

    def _require_layouts(
        self, analysis: Analysis, storage: Mapping[str, Layout], outputs: Mapping[str, Layout]
    ) -> None:
        """Raise `PlanError` unless all that is stored or leaves has a layout, and nothing else."""
        needed = (*analysis.outputs, *(tensor.name for tensor in analysis.graph.parameters))
        missing = [name for name in needed if name not in storage and name not in outputs]
        if missing:
            raise PlanError(f"the plan gives no layout for {', '.join(map(repr, missing[:10]))}")
        # In evaluation a model has fewer outputs than planned.
        leaving = outputs if self._is_of(analysis.graph) else {}
        for name in (*storage, *leaving):
            if name not in analysis.graph.tensors:
                raise PlanError(f"the plan stores {name!r}, which is not in the model")
        for name, layout in outputs.items():
            if any(place != R and place.kind is not Kind.SPLIT for place in layout):
                raise PlanError(
                    f"the plan gives {name!r} as [{format_layout(layout)}]; what leaves is whole "
                    "or split on each axis"
                )

    def _in_host_memory(self, analysis: Analysis) -> frozenset[str]:
        """The parameters whose optimizer state is in host memory; `PlanError` if one has none."""
        host = frozenset(
            name for name, parameter in self.parameters.items() if parameter.state == "host"
        )
        untrained = [
            name
            for name in sorted(host)
            if not (analysis.train and analysis.graph.tensors[name].trainable)
        ]
        if untrained:
            raise PlanError(
                "the plan has optimizer state in host memory of what is not trained: "
                f"{', '.join(map(repr, untrained[:10]))}"
            )
        return host

    def meshes(self) -> dict[str, tuple[AxisSpec, ...]]:
        """The mesh of each operator: that of its stage, if there are stages."""
        if not self.stages:
            return dict.fromkeys(self.operators, self.mesh)
        return {name: self.stages[chunk].mesh for name, chunk in self.chunks().items()}

    def chunks(self) -> dict[str, int]:
        """The number of every operator's stage, or of its chunk in an interleaved pipeline."""
        firsts = {stage.first: number for number, stage in enumerate(self.stages)}
        chunks = {}
        number = 0
        for name in self.operators:
            number = firsts.get(name, number)
            chunks[name] = number
        return chunks

    def _is_of(self, graph: Graph) -> bool:
        """Whether the plan was made for this very graph, and not for another mode of its model."""
        return graph.fingerprint() == self.model.fingerprint

    def _decision(self, name: str, analysis: Analysis, mesh: Mesh) -> Decision:
        if name not in self.operators:
            raise PlanError(f"the plan has no strategy for the operator {name!r}")
        return named_decision(name, analysis.offers[name], self.operators[name].strategy, mesh)

    def program(self, analysis: Analysis) -> Program:
        """The local program that executes the plan."""
        return build_program(analysis.graph, self.assignment(analysis))

    def _require_that_stages_merge_passes(self) -> None:
        """Raise a `PlanError` unless the pipeline merges passes where the plan says so."""
        said = self.schedule.overlap_experts
        if said != schedule_named(self.schedule.pipeline).merges:
            names = " or ".join(row.name for row in SCHEDULES.values() if row.merges)
            raise PlanError(
                f"the plan's schedule has overlap_experts={str(said).lower()} and the pipeline "
                f"{self.schedule.pipeline!r}: stages merge passes under {names} alone"
            )

    def execution(self, analysis: Analysis) -> Execution:
        """The execution of a step of the plan; `PlanError` if part of it cannot be executed."""
        if not self.stages:
            return execution(self.assignment(analysis), analysis, self.schedule.in_stage)
        self._require_that_stages_merge_passes()
        meshes = tuple(mesh_of(stage.mesh) for stage in self.stages)
        cut = Pipelined(
            firsts=tuple(stage.first for stage in self.stages),
            meshes=meshes,
            pipeline=self.schedule.pipeline,
            interleave=self.schedule.interleave,
            schedule=self.schedule.in_stage,
        )
        staged = staged_execution(analysis, self._decided(analysis), cut)
        for chunk in staged.chunks:
            for name, layout in chunk.stored.items():
                self._require_storable(analysis.graph.tensors[name], layout, chunk.mesh)
        return staged


def as_text(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Layouts in the notation of the file."""
    return {name: format_layout(layout) for name, layout in layouts.items()}


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of the plan file."""
    return Plan.model_json_schema(by_alias=True)
