"""Known models: graphs of every kind of layer, their parameters beside Hugging Face's counts, and
what frameworks make of them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import FRAMEWORKS, LOSSES, Habits, Kernels, framework_named
from autopar.errors import ModelError, UsageError
from autopar.order.scheduled import scheduled
from benchmarks.validating.known import Latent, Shape
from benchmarks.validating.known.transformer import transformer
from benchmarks.validating.summed import Configuration, price
from benchmarks.validating.summed.layer_distribution import dealt
from benchmarks.validating.summed.part_figures import alone, of_kinds, places_of
from benchmarks.validating.summed.part_seconds import Parts
from benchmarks.validating.summed.stage_memory import working

CLUSTER = load_cluster("dgx-h100")
SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
LLAMA = SMALL | {
    "model_type": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
GPT = Shape(
    layers=4, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=4096, sequence=512, dropout=False
)
MIXTURE = replace(
    GPT,
    gated=True,
    bias=False,
    experts=8,
    expert_ffn=512,
    norm="rms_norm",
    position="rotary",
    tied=False,
)


def written(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# --- configurations of Hugging Face ---


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # As counted by transformers 5.23 on the meta device.
        (LLAMA | {"num_hidden_layers": 2}, 6_662_656),
        (
            LLAMA
            | {
                "num_hidden_layers": 2,
                "model_type": "qwen3",
                "head_dim": 128,
                "tie_word_embeddings": False,
            },
            7_973_888,
        ),
        (
            LLAMA | {"num_hidden_layers": 2, "model_type": "mixtral", "num_local_experts": 8},
            36_948_480,
        ),
        (
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            124_439_808,
        ),
        (
            SMALL
            | {
                "model_type": "gpt_neox",
                "num_hidden_layers": 2,
                "intermediate_size": 2048,
                "tie_word_embeddings": False,
            },
            7_329_792,
        ),
    ],
)
def test_parameters_of_a_configuration_are_those_of_the_model(
    config: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    shape = Shape.of(written(tmp_path, **config))
    assert sum(t.size for t in transformer(shape, batch=1).graph.parameters) == parameters


def test_a_configuration_of_deepseek_has_all_its_parts(tmp_path: Path) -> None:
    config = (
        SMALL
        | EXPERTS
        | {
            "model_type": "deepseek_v3",
            "intermediate_size": 1408,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "num_nextn_predict_layers": 1,
        }
    )
    shape = Shape.of(written(tmp_path, **config), sequence=64)
    assert shape.latent == Latent(kv_rank=128, q_rank=256, nope=128, rope=64, value=128)
    assert (shape.shared_ffn, shape.groups, shape.top_groups, shape.mtp, shape.sequence) == (
        512,
        4,
        2,
        1,
        64,
    )
    assert shape.kinds() == ("dense", "experts", "experts", "experts")
    assert {
        transformer(shape, batch=1).part(op.name)
        for op in transformer(shape, batch=1).graph.operators
    } == {"embed", "dense", "experts", "mtp", "head"}


def test_windows_alternate_as_the_types_of_layers_say(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    shape = Shape.of(written(tmp_path, **LLAMA, sliding_window=128, layer_types=types))
    assert shape.kinds() == ("dense windowed", "dense", "dense windowed", "dense")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": "llama"}', ModelError, "hidden_size"),
        ("[1]", ModelError, "holds no JSON object"),
        ("{", ModelError, "cannot be read as a configuration"),
        ("[" * 100_000, ModelError, "cannot be read as a configuration"),
        (json.dumps(LLAMA | {"hidden_size": 2**40}), ModelError, "hidden_size"),
        (
            json.dumps(LLAMA | {"num_attention_heads": 7, "num_key_value_heads": 7}),
            ModelError,
            "7 heads must divide hidden 512",
        ),
        (
            json.dumps(LLAMA | {"model_type": "mamba"}),
            UsageError,
            "unknown model_type 'mamba': valid are",
        ),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    text: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        Shape.of(path)
    with pytest.raises(ModelError, match="nowhere"):
        Shape.of(tmp_path / "nowhere.json")


# --- layers ---


def parts(shape: Shape, c: Configuration) -> Parts:
    cluster = CLUSTER.sized(c.devices)
    return Parts(
        of_kinds(shape), alone(c), cluster, places_of(c, cluster), kinds=tuple(shape.of_each_kind())
    )


def test_experts_take_time_by_their_rows_alone() -> None:
    """No one-hot products: with twice the tokens a layer's experts take at most twice as long,
    whatever the sequence.
    """
    results = []
    for sequence in (4096, 8192):
        given = parts(
            replace(MIXTURE, sequence=sequence), Configuration(global_batch=8, micro_batch=8)
        )
        step = next(
            s
            for s in given.program().steps
            if getattr(getattr(s, "operator", None), "kind", "") == "autopar.experts"
        )
        results.append(given.operator(step).forward)  # type: ignore[arg-type]
    assert 1.7 < results[1] / results[0] < 2.05


def test_latent_attention_keeps_what_is_small() -> None:
    latent = Latent(kv_rank=128, q_rank=256, nope=64, rope=32, value=64)
    c = Configuration(global_batch=2, micro_batch=2)
    wide, narrow = (
        working(s, c, CLUSTER)["dense"].saved
        for s in (MIXTURE_DENSE, replace(MIXTURE_DENSE, latent=latent))
    )
    assert narrow != wide
    names = [
        op.name
        for op in transformer(replace(MIXTURE_DENSE, latent=latent), batch=1).graph.operators
        if op.name.startswith("layers.0.")
    ]
    assert {
        "layers.0.attention.q_down",
        "layers.0.attention.kv_down",
        "layers.0.attention.kv_up",
    } <= set(names)


MIXTURE_DENSE = replace(MIXTURE, experts=0)
LARGE = replace(
    MIXTURE_DENSE, layers=2, hidden=4096, heads=32, kv_heads=8, ffn=11008, sequence=4096
)
"""Its kernels take longer than the host needs to issue them."""


def test_a_decoder_reads_its_encoder_and_patches_have_no_vocabulary() -> None:
    t5 = replace(GPT, layers=2, encoder_layers=3, encoder_sequence=1024, position="none")
    model = transformer(t5, batch=2)
    assert model.kinds == ("encoder",) * 3 + ("dense",) * 2
    assert sum(op.name.endswith("cross.core") for op in model.graph.operators) == 2
    causal = [
        op.attributes["is_causal"] for op in model.graph.operators if op.name.endswith(".core")
    ]
    assert causal == [False] * 3 + [True, False] * 2
    vit = transformer(replace(GPT, patch=16, causal=False, sequence=196, vocab=1000), batch=2)
    assert {vit.graph.tensors[name].shape for name in vit.graph.inputs} == {(2, 196, 768), (2,)}


def test_windows_make_attention_cheaper() -> None:
    long = replace(GPT, sequence=16384)
    c = Configuration(global_batch=1)
    assert price(replace(long, window=512), c, CLUSTER).step < 0.8 * price(long, c, CLUSTER).step


def test_rows_that_are_sent_once_move_less() -> None:
    shape = replace(MIXTURE, experts=32, top_k=8)
    c = Configuration(global_batch=8, data=8, expert=8)
    every, once = (
        parts(shape, replace(c, dispatcher=name)).parts()["experts"].travel_backward
        for name in ("alltoall", "rank")
    )
    assert once == pytest.approx(every * shape.domains_of_a_token(8) / 8, rel=0.2)


def test_experts_over_tensor_parallel_ranks_are_whole() -> None:
    c = Configuration(
        global_batch=8, data=2, tensor=4, expert=8, expert_tensor=1, sequence_parallel=True
    )
    assert parts(MIXTURE, c).parts()["experts"].experts == 3 * 1024 * 512
    split = replace(c, expert=2, expert_tensor=0)
    assert parts(MIXTURE, split).parts()["experts"].experts == 4 * 3 * 1024 * 512 / 4, "four of 8"
    with pytest.raises(UsageError, match="sequence_parallel is needed"):
        replace(c, sequence_parallel=False)


def test_heads_are_shared_out_by_all_to_alls() -> None:
    c = Configuration(global_batch=1, context=4)
    kinds = []
    for way in ("ring", "heads"):
        issued = scheduled(parts(GPT, replace(c, context_by=way)).program()).collectives()
        kinds.append(Counter(x.kind for x in issued if "attention" in x.tensor))
    assert kinds[0]["send"] and not kinds[0]["all_to_all"]
    assert kinds[1]["all_to_all"] and not kinds[1]["send"]
    with pytest.raises(UsageError, match="unknown context_by 'both': valid are ring, heads"):
        replace(c, context_by="both")


# --- frameworks ---


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_prices_a_model(name: str) -> None:
    work = framework_named(name)
    priced = price(
        MIXTURE_DENSE.run_by(work),
        Configuration(global_batch=16, data=8, zero=1).run_by(work),
        CLUSTER,
    )
    assert 0 < priced.arithmetic < priced.step and priced.fits


def test_an_unknown_framework_is_an_error_that_lists_them() -> None:
    with pytest.raises(UsageError, match="unknown framework 'jax': valid are alpa, auto"):
        framework_named("jax")


@pytest.mark.parametrize(
    ("habits", "kernels"),
    [
        (Habits(fused=True), Kernels()),
        (Habits(loss="one-kernel"), Kernels()),
        (Habits(compiled=True), Kernels()),
        (Habits(pipelined_tensor=True), Kernels()),
        (Habits(fused_accumulation=True), Kernels()),
        (Habits(), Kernels(joined=True)),
        (Habits(), Kernels(products="float8_e4m3fn")),
        (Habits(), Kernels(attention="cudnn")),
    ],
)
def test_what_frameworks_do_better_is_faster(habits: Habits, kernels: Kernels) -> None:
    c = Configuration(
        global_batch=64, micro_batch=2, tensor=4, data=2, kernels=Kernels(attention="flash2")
    )
    plain = price(LARGE, replace(c, habits=Habits(overlap_tensor=False)), CLUSTER)
    assert price(LARGE, replace(c, habits=habits, kernels=kernels), CLUSTER).step < plain.step


@pytest.mark.parametrize(
    ("habits", "kernels"),
    [
        (Habits(filled=True), Kernels()),
        (Habits(blocking=True), Kernels()),
        (Habits(loss="megatron"), Kernels()),
        (Habits(), Kernels(norm="unfused")),
        (Habits(), Kernels(attention="flash1")),
        (Habits(), Kernels(attention="triton")),
        (Habits(update_traffic=88.0), Kernels()),
    ],
)
def test_what_frameworks_do_beside_is_slower(habits: Habits, kernels: Kernels) -> None:
    c = Configuration(global_batch=64, micro_batch=8, tensor=1, data=2)
    assert (
        price(LARGE, replace(c, habits=habits, kernels=kernels), CLUSTER).step
        > price(LARGE, c, CLUSTER).step
    )


def test_metrics_of_the_training_read_all_logits_again() -> None:
    c = Configuration(global_batch=64, micro_batch=8, data=2)
    plain, watched = (
        price(LARGE, replace(c, habits=Habits(loss=loss)), CLUSTER).step
        for loss in ("one-kernel", "one-kernel, two metrics")
    )
    assert watched > plain


def test_what_stays_in_fused_and_narrow_kernels_is_not_kept() -> None:
    """A fused gate keeps neither its activation nor what it is multiplied with; operands cast to 8
    bits are kept so.
    """
    c = Configuration(global_batch=2, micro_batch=2, kernels=Kernels(joined=True))
    tokens = 2 * MIXTURE_DENSE.sequence
    plain = working(MIXTURE_DENSE, c, CLUSTER)["dense"].saved
    fused = working(MIXTURE_DENSE, replace(c, habits=Habits(fused=True)), CLUSTER)["dense"].saved
    assert plain - fused == 2 * tokens * MIXTURE_DENSE.ffn
    narrow = working(
        MIXTURE_DENSE, replace(c, kernels=Kernels(joined=True, products="float8_e4m3fn")), CLUSTER
    )["dense"].saved
    # The operands of queries and of the gate are halved, and the product's; attention keeps its
    # result beside the narrow copy.
    assert plain - narrow == pytest.approx(tokens * (1024 + 1024 + MIXTURE_DENSE.ffn - 1024))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_alive_what_its_kernels_have(name: str) -> None:
    c = Configuration(global_batch=2, micro_batch=2, tensor=2, habits=Habits(loss=name))
    actual = working(MIXTURE_DENSE, c, CLUSTER.sized(2))["head"]
    assert (
        actual.excess == LOSSES[name].at_most * 2 * MIXTURE_DENSE.sequence * MIXTURE_DENSE.vocab / 2
    )


# --- stages ---


@pytest.mark.parametrize(
    ("partition", "interleave", "counts"),
    [
        ("even", 1, [2, 3, 3, 2]),
        ("items", 1, [2, 3, 3, 2]),
        ("greedy", 1, [3, 3, 3, 1]),
        ("even", 2, [3, 2, 2, 3]),
    ],
)
def test_layers_are_dealt_out(partition: str, interleave: int, counts: list[int]) -> None:
    c = Configuration(
        global_batch=8, pipeline=4, interleave=interleave, habits=Habits(partition=partition)
    )
    actual = dealt(replace(GPT, layers=10), c, {"embed": 1.0, "dense": 1.0})
    assert sum(sum(stage.values()) for stage in actual) == 10
    assert [sum(stage.values()) for stage in actual] == counts


def test_stages_hold_the_kinds_of_their_layers() -> None:
    c = Configuration(global_batch=8, pipeline=2)
    assert dealt(replace(MIXTURE, dense_layers=1), c, {}) == [
        Counter(dense=1, experts=1),
        Counter(experts=2),
    ]
