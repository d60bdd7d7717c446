"""The tables of costs from which a plan was solved, built again from the plan."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.costmodel import Cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.order.schedules import SCHEDULES, in_flight
from autopar.plan import Plan
from autopar.planning.model.counts import Counts
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.stages.estimate import Pipe
from autopar.planning.tables.alone import tables_alone, weight_share
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.offload import offering_host
from autopar.planning.tables.parameters.first_read import early_on
from autopar.planning.tables.parameters.traffic import hideable
from autopar.planning.tables.tables import Tables
from autopar.schemes import stages_of
from autopar.sharding.analysis import Analysis
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.schedule import zero_stage


def work_of_plan(plan: Plan, analysis: Analysis, cluster: Cluster) -> Multiplicities:
    """The multiplicities of a step, from the schedule of the plan."""
    schedule = plan.schedule
    stages = stages_of(plan)
    count = schedule.micro_batches
    row = SCHEDULES[schedule.pipeline]
    weight = weight_share(*tables_alone(analysis, cluster, Counts())) if row.splits else 0.0
    zero = zero_stage(schedule.gathered, schedule.accumulated)
    parameters = sum(p.bytes for p in analysis.graph.parameters)
    pipe = Pipe(stages=stages, micro_batches=count, weight=weight, share=cluster.core_share)
    work = Multiplicities(
        passes=count + pipe.bubble(schedule.pipeline, schedule.interleave),
        accumulating=count > 1,
        segments=schedule.recompute,
        in_flight=in_flight(schedule.pipeline, 0, stages, count, schedule.interleave),
        zero=zero,
        early=early_on(plan.mesh_, analysis, cluster, Counts()).readers
        if analysis.train and stages == 1
        else {},
    )
    hidden = hideable(_prices(plan, cluster), parameters, work, analysis.graph.tensors, stages)
    return replace(work, hidden=hidden) if analysis.train else work


def tables_of_plan(plan: Plan, analysis: Analysis, cluster: Cluster) -> Tables:
    """The tables of the plan's search.

    They are of a micro-batch on the mesh of a stage, with the schedule's multiplicities.
    """
    schedule = plan.schedule
    work = work_of_plan(plan, analysis, cluster)
    part = split_batch(analysis, schedule.micro_batches) if schedule.micro_batches > 1 else analysis
    tables = build_tables(
        part,
        _prices(plan, cluster),
        optimizer=plan.model.optimizer,
        work=work,
        types=schedule.types,
    )
    hosts = any(parameter.state == "host" for parameter in plan.parameters.values())
    return offering_host(tables, room=math.inf) if hosts else tables


def _prices(plan: Plan, cluster: Cluster) -> MeshPrices:
    return MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=plan.schedule.unit_bytes)
