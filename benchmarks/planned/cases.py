"""The planned cases: models by source, clusters, limits, and the most that planning may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.ir import Graph
    from autopar.planning.model.request import Request

SEQUENCE = 1024
"""Tokens of GPT-2."""
IMPORTS = {
    "gpt2": ("autopar.frontends.load",),
    "file": ("autopar.frontends.load",),
    "folder": ("torch", "transformers", "autopar.frontends.torch", "benchmarks.searching.models"),
    "torch": ("torch", "transformers", "autopar.frontends.torch", "benchmarks.searching.models"),
    "class": ("torch", "transformers", "autopar.frontends.torch", "benchmarks.searching.classes"),
    "shape": ("benchmarks.searching.models",),
}
"""The sources of models, and what to import, besides the planner, before one is read.

`gpt2`: the ONNX file that `examples/gpt2_onnx.py` writes. `file`, `folder`: an ONNX file and a
PyTorch model of a folder of public models. `torch`: exported on the meta device from a
configuration. `class`: made of a class of transformers, at the sizes of its own defaults or those
of a public model. `shape`: made from its sizes alone.
"""
FILES = "onnx/exported_full"
"""Folder of public models with the ONNX files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its cluster.

    `model`: a function of `benchmarks.searching.models`, a file, a name in the folder of models, or
    of a class of transformers.
    `layers`: their number (None: all). `mesh`: the sizes of a stage's. `share`: of the memory that
    the fastest plan takes, which is found before anything is timed. `memory`: bytes of a device.
    `targets`: upper limits of figures of the row. `no_slower`: the name of the case whose step must
    not be exceeded.
    """

    name: str
    model: str = ""
    source: str = "shape"
    layers: int | None = None
    batch: int
    cluster: str = "dgx-h100"
    devices: int
    stages: int | None = None
    mesh: tuple[int, ...] | None = None
    share: float | None = None
    memory: float | None = None
    quick: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    no_slower: str = ""

    @property
    def is_file(self) -> bool:
        """Whether it is planned by a command, too."""
        return self.source in ("gpt2", "file")

    @property
    def is_public(self) -> bool:
        """Whether it needs the folder of public models."""
        return self.source in ("file", "folder")


def full_size(name: str, file: str, batch: int = 64) -> Case:
    """A full-size ONNX file without weights on 64 devices."""
    return Case(
        name=f"{name}-onnx",
        source="file",
        model=file,
        batch=batch,
        devices=64,
        targets={"cpu_s": 5.0, "gap": 0.1},
    )


def wide(name: str, model: str, batch: int, source: str = "class") -> Case:
    """A wide graph on 8 devices, with 60 % of the memory that its fastest plan takes."""
    return Case(
        name=f"{name}-tight",
        source=source,
        model=model,
        batch=batch,
        devices=8,
        share=0.6,
        targets={"cpu_s": 20.0, "gap": 0.1},
    )


CASES = (
    Case(
        name="gpt2-small",
        source="gpt2",
        batch=8,
        devices=8,
        quick=True,
        targets={"cpu_s": 1.0, "gap": 0.05},
    ),
    Case(
        name="llama3-8b-4-exported",
        model="llama3_8b",
        source="torch",
        layers=4,
        batch=64,
        devices=64,
        quick=True,
    ),
    Case(name="llama3-8b-exported", model="llama3_8b", source="torch", batch=64, devices=64),
    Case(
        name="llama3-8b-exported-8",
        model="llama3_8b",
        source="torch",
        batch=64,
        devices=8,
        targets={"plan_s": 6.0},
    ),
    Case(
        name="llama3-8b",
        model="llama3_8b",
        batch=64,
        devices=64,
        quick=True,
        targets={"plan_s": 3.0},
    ),
    Case(
        name="llama3-8b-6-tight",
        model="llama3_8b",
        layers=6,
        batch=32,
        devices=8,
        share=0.35,
        targets={"plan_s": 3.0},
    ),
    full_size("bert", "bert_op23.opt.onnx"),
    full_size("vit", "vit_op23.opt.onnx"),
    full_size("llama3-8b", "llama3_8b_op23.opt.onnx"),
    full_size("llama3-70b", "llama3_70b.opt.onnx"),
    full_size("t5", "t5_op20.opt.onnx"),
    full_size("sd-unet", "sd_unet_op20.opt.onnx"),
    wide("swin", "SwinForImageClassification", 64),
    wide("sam-vision", "SamVisionModel", 8),
    wide("jamba", "JambaForCausalLM", 8),
    wide("sd-unet", "sd_unet", 8, "folder"),
    Case(
        name="t5-onnx-8",
        source="file",
        model="t5_op20.opt.onnx",
        batch=32,
        devices=8,
        targets={"cpu_s": 5.0},
    ),
    Case(
        name="t5-onnx-8-39g",
        source="file",
        model="t5_op20.opt.onnx",
        batch=32,
        devices=8,
        memory=39e9,
        targets={"cpu_s": 5.0},
    ),
    Case(
        name="mamba2-2x2x2",
        source="folder",
        model="mamba2",
        batch=8,
        devices=8,
        mesh=(2, 2, 2),
        targets={"plan_s": 20.0, "gap": 0.02},
    ),
    Case(
        name="sd-unet-2x2x2",
        source="folder",
        model="sd_unet",
        batch=8,
        devices=8,
        mesh=(2, 2, 2),
        targets={"plan_s": 20.0, "gap": 0.02},
    ),
    Case(
        name="llama3-70b-96-tight",
        model="llama3_70b",
        batch=96,
        devices=96,
        share=0.5,
        targets={"plan_s": 8.0},
    ),
    Case(
        name="deepseek-v3-exported",
        model="deepseek_v3",
        source="torch",
        batch=1024,
        devices=1024,
        targets={"cpu_s": 30.0},
    ),
    Case(
        name="gpt3-175b",
        model="gpt3_175b",
        batch=1536,
        cluster="dgx-a100-80g",
        devices=3072,
        targets={"plan_s": 4.0},
        no_slower="gpt3-175b-64x6x8",
    ),
    Case(
        name="gpt3-175b-64x6x8",
        model="gpt3_175b",
        batch=1536,
        cluster="dgx-a100-80g",
        devices=3072,
        stages=64,
        mesh=(6, 8),
    ),
    Case(
        name="llama3-405b", model="llama3_405b", batch=2048, devices=16384, targets={"plan_s": 6.0}
    ),
    Case(
        name="moe-1t",
        model="moe_1t",
        batch=16384,
        devices=131072,
        targets={"plan_s": 8.0, "peak_gb": 1.0},
    ),
)
CASES_BY_NAME = {case.name: case for case in CASES}


def graph_of(case: Case, path: Path) -> Graph:
    """The training step of a case; `path`: its ONNX file, or the folder of models."""
    if case.is_file:
        from autopar.frontends.load import ModelOptions, load_model

        return load_model(
            path,
            ModelOptions(
                batch=case.batch, dims={"sequence": SEQUENCE} if case.source == "gpt2" else {}
            ),
        ).graph
    from benchmarks.searching import models

    if case.source == "folder":
        return models.full_size(path, case.model, case.batch)
    if case.source == "class":
        from benchmarks.searching.classes import of_class

        return of_class(case.model, case.batch)
    sized = {} if case.layers is None else {"layers": case.layers}
    if case.source == "torch":
        return models.exported(models.CONFIGURATIONS[case.model](**sized), case.batch)
    return models.shaped(getattr(models, case.model)(**sized), case.batch)


def request_of(case: Case, graph: Graph) -> Request:
    """The request of a case; a share of the fastest plan's memory asks for that plan first."""
    from autopar.costmodel import load_cluster
    from autopar.planning.model.request import Request
    from autopar.planning.planner import search_plan
    from autopar.schemes.pinning import stage_mesh

    cluster = load_cluster(case.cluster).sized(case.devices)
    mesh = None if case.mesh is None else stage_mesh(cluster, case.mesh, case.stages or 1)
    request = Request(cluster=cluster, stages=case.stages, mesh=mesh, memory=case.memory)
    if case.share is None:
        return request
    free = search_plan(graph, replace(request, memory=math.inf))
    return replace(request, memory=case.share * free.predicted.memory)
