"""Configurations of published runs: what cannot run, the kernels there are for their sizes, and the
layers of their chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel.frameworks import FRAMEWORKS, Habits, Kernels, framework_named
from autopar.errors import UsageError
from autopar.integrations.importing.pipeline_layout import chunks_of
from benchmarks.validating.configuration import Configuration
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer
from benchmarks.validating.layer_distribution import layers_of_chunks
from benchmarks.validating.priced import own_kernels

SHAPE = Shape(
    layers=10, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=32, dropout=False
)
FUSED = Kernels(attention="fused", skips_masked=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute": "some"}, "unknown recompute 'some': valid are none, selective, full"),
        ({"zero": 4}, "ZeRO stages are 0 to 3"),
        ({"data": 3}, "no multiple of 3 x 1"),
        ({"tensor": 0}, "tensor must be at least 1"),
        ({"data": 4, "expert": 3}, "do not make groups of 3 expert-parallel ranks x 1"),
        ({"tensor": 4, "expert": 8, "expert_tensor": 1}, "do not make groups of 8"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'"),
        ({"dispatcher": "mail"}, "unknown dispatcher 'mail'"),
        ({"context_by": "both"}, "unknown context_by 'both': valid are ring, heads"),
        ({"pipeline": 2, "layout": ("EtttttL",)}, "1 chunks is none of 2 stages"),
        ({"data": 8, "zero": 3, "shards": 3}, "do not make groups of 3"),
        ({"data": 8, "zero": 3, "shards": -1}, "do not make groups of -1"),
    ],
)
def test_impossible_configurations_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(Configuration(global_batch=8), **change)


def test_unknown_words_of_a_framework_are_errors() -> None:
    with pytest.raises(UsageError, match="'all': valid are even, greedy, items, balanced"):
        Habits(partition="all")
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        Kernels(attention="flash")
    with pytest.raises(UsageError, match="unknown framework 'jax': valid are alpa, auto"):
        framework_named("jax")


def test_a_configuration_keeps_its_dispatcher_in_any_framework() -> None:
    c = Configuration(global_batch=8, dispatcher="node")
    assert {c.run_by(work).kernels.dispatcher for work in FRAMEWORKS.values()} == {"node"}


def test_replicas_share_out_in_groups_that_are_copies() -> None:
    c = Configuration(global_batch=16, data=16, zero=3, shards=8)
    assert (c.sharing, c.copies) == (8, 2)
    assert replace(c, shards=0).sharing == replace(c, zero=0).sharing == 16


@pytest.mark.parametrize(
    ("heads", "tensor", "micro_batch", "kernel"),
    [
        (32, 1, 1, "fused"),
        (40, 4, 1, "unfused"),
        (40, 4, 2, "fused"),
        (6, 1, 1, "unfused"),
        (40, 2, 1, "fused"),
    ],
)
def test_there_is_no_kernel_for_some_numbers_of_heads(
    heads: int, tensor: int, micro_batch: int, kernel: str
) -> None:
    c = Configuration(
        global_batch=micro_batch, micro_batch=micro_batch, tensor=tensor, kernels=FUSED
    )
    shape = replace(SHAPE, hidden=heads * 64, heads=heads, kv_heads=heads)
    assert own_kernels(shape, c).attention == kernel
    another = Kernels(attention="fused")
    assert own_kernels(shape, replace(c, kernels=another)).attention == "fused", "another project's"


def layers(c: Configuration, shape: Shape = SHAPE) -> list[int]:
    return layers_of_chunks(shape, c, transformer(shape, batch=1).graph)


@pytest.mark.parametrize(
    ("partition", "interleave", "counts"),
    [
        ("even", 1, [2, 3, 3, 2]),
        ("items", 1, [2, 3, 3, 2]),
        ("greedy", 1, [3, 3, 3, 1]),
        ("even", 2, [1, 1, 1, 2, 2, 1, 1, 1]),
    ],
)
def test_layers_are_dealt_out(partition: str, interleave: int, counts: list[int]) -> None:
    habits = Habits(partition=partition)
    c = Configuration(global_batch=8, pipeline=4, interleave=interleave, habits=habits)
    assert layers(c) == counts


def test_tables_of_the_ends_count_as_the_layers_that_hold_as_many() -> None:
    """A table of 1,536 rows of 64 elements is as large as two layers."""
    c = Configuration(global_batch=8, pipeline=2, habits=Habits(partition="balanced"))
    assert layers(c) == [5, 5]
    untied = replace(SHAPE, layers=11, vocab=1536, tied=False)
    assert layers(replace(c, pipeline=3), untied) == [3, 5, 3]


def test_chunks_hold_what_a_run_states() -> None:
    c = Configuration(global_batch=8, pipeline=4, interleave=2)
    layout = chunks_of("E|t*2|t*2|t*2|t|t|t*2|L")
    assert layers(replace(c, layout=layout)) == [0, 2, 2, 2, 1, 1, 2, 0], "an end alone"
    assert layers(replace(c, dealt=(1, 1, 1, 1, 1, 1, 1, 3))) == [1, 1, 1, 1, 1, 1, 1, 3]
    with pytest.raises(UsageError, match="9 layers, the model 10"):
        layers(replace(c, layout=chunks_of("E|t*2|t*2|t*2|t|t|t|L")))


@pytest.mark.parametrize(("partition", "stages"), [("even", 10), ("items", 12)])
def test_every_chunk_has_a_layer_or_an_end(partition: str, stages: int) -> None:
    c = Configuration(global_batch=8, pipeline=stages, habits=Habits(partition=partition))
    assert len(layers(c)) == stages and sum(layers(c)) == 10
    with pytest.raises(UsageError, match=f"{stages + 1} pipeline stages"):
        layers(replace(c, pipeline=stages + 1))
