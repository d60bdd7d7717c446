"""Stages of an imported configuration hold the layers that its file deals out to them."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.integrations.convert.stage_layers import stage_layers
from autopar.integrations.importing import Hardware, import_configuration, read_configuration
from autopar.integrations.importing.pipeline_layout import chunks_of
from autopar.model import LoadedModel
from autopar.plan import Plan
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer

LAYERS = 8


@functools.cache
def model() -> LoadedModel:
    """A model whose head takes longer than a layer, so that equal stages are not the fastest."""
    shape = Shape(
        layers=LAYERS, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=65536, sequence=1024
    )
    graph = transformer(shape, batch=8).graph
    return LoadedModel(graph=graph, source=graph)


def imported(text: str, name: str, folder: Path) -> Plan:
    """The plan of a file for two devices."""
    (folder / name).write_text(text)
    here = Hardware(devices=2, cluster="dgx-h100")
    configuration = read_configuration(folder / name)
    return import_configuration(configuration, model(), here, compare=False).planned.plan


def counts(plan: Plan) -> tuple[int, ...]:
    """The number of layers of every chunk, of which the plan cuts none."""
    layout = stage_layers(plan)
    assert layout is not None and not layout.cut
    return tuple(map(len, layout.chunks))


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ("", (4, 4)),
        ("--num-virtual-stages-per-pipeline-rank 2", (2, 2, 2, 2)),
        ('--pipeline-model-parallel-layout "Et*5|t*3L"', (5, 3)),
        ('--pipeline-model-parallel-layout "Et|t*4|t*2|tL"', (1, 4, 2, 1)),
        ("--decoder-first-pipeline-num-layers 6", (6, 2)),
    ],
)
def test_chunks_hold_the_layers_of_megatrons_file(
    more: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    text = f"--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 {more}"
    assert counts(imported(text, "run.sh", tmp_path)) == layers


def test_layers_that_make_no_equal_chunks_are_refused(tmp_path: Path) -> None:
    text = (
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 "
        "--num-virtual-stages-per-pipeline-rank 3"
    )
    with pytest.raises(UsageError, match="8 layers, with the ends that count, do not make 6 ch"):
        imported(text, "run.sh", tmp_path)


def test_other_files_cut_between_layers(tmp_path: Path) -> None:
    """The head counts as layers where the file says no numbers, as in torchtitan."""
    text = "[parallelism]\npipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 8\n"
    first, last = counts(imported(text, "run.toml", tmp_path))
    assert first + last == LAYERS and first >= last


@pytest.mark.parametrize("layout", ["E|t*4|t*4|L", "Et|t*4|t*3|L", "E|t*5|t*2|tL"])
def test_a_chunk_may_hold_the_embedding_or_the_loss_alone(layout: str, tmp_path: Path) -> None:
    text = (
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 "
        f'--pipeline-model-parallel-layout "{layout}"'
    )
    stages = imported(text, "run.sh", tmp_path).stages
    begins = [stage.first for stage in stages]
    letters = chunks_of(layout)
    layers = list(itertools.accumulate((chunk.count("t") for chunk in letters), initial=0))
    told = [f"layers.{layer}.norm1" if layer < LAYERS else "head" for layer in layers[1:-1]]
    assert begins[0].startswith("embed")
    assert all(name.startswith(said) for name, said in zip(begins[1:], told, strict=True))
