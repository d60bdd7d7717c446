"""State-space layers: sizes as Hugging Face has them, their work, their place among other layers,
and what splits them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device import scan_kernels
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.products import Product
from autopar.costmodel.device.scan_kernels import Kernel, ScanKernels
from autopar.costmodel.frameworks import framework_named
from autopar.errors import ModelError, UsageError
from autopar.sharding.program import Compute
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.rules.recurrent import STATE_SPACE
from benchmarks.validating.known import Shape
from benchmarks.validating.known.shape import StateSpace
from benchmarks.validating.known.state_part import SCAN
from benchmarks.validating.known.transformer import transformer
from benchmarks.validating.summed import Configuration, price
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.part_seconds import Parts
from benchmarks.validating.summed.stage_memory import working

CLUSTER = load_cluster("dgx-h100")
STATE = StateSpace(heads=32, width=64, size=128, groups=8)
SHAPE = Shape(
    layers=6,
    hidden=1024,
    heads=16,
    kv_heads=4,
    ffn=4096,
    vocab=4096,
    sequence=1024,
    pattern="M-M*ME",
    state=STATE,
    experts=16,
    top_k=4,
    expert_ffn=512,
    shared_ffn=1024,
    bias=False,
    dropout=False,
    tied=False,
    norm="rms_norm",
    position="none",
)
CORE = framework_named("megatron-core")


def parameters(shape: Shape) -> int:
    return sum(t.size for t in transformer(shape, batch=1).graph.parameters)


def test_every_letter_of_a_pattern_is_a_layer_of_its_own() -> None:
    assert SHAPE.kinds() == (
        "state",
        "dense alone",
        "state",
        "attention alone",
        "state",
        "experts alone",
    )
    mixer = 1024 * (3 * 2048 + 2 * 8 * 128 + 32) + 2048  # in, out and the weight of the gated norm
    assert parameters(
        replace(SHAPE, layers=1, pattern="M")
    ) - 2 * 4096 * 1024 - 2 * 1024 == pytest.approx(mixer, rel=0.01)
    whole = sum(parameters(replace(SHAPE, layers=1, pattern=letter)) for letter in SHAPE.pattern)
    assert parameters(SHAPE) == whole - 5 * (2 * 4096 * 1024 + 1024), "the ends once"


def kernels_of_scan(state: StateSpace) -> ScanKernels:
    """The kernels of a scan of 1,024 rows on one device."""
    graph = transformer(replace(SHAPE, layers=1, pattern="M", state=state), batch=1).graph
    call = Call.of(graph, next(op for op in graph.operators if op.kind == STATE_SPACE))
    rule = rule_of(call)
    local = np.array([[float(factor.size) for factor in rule.factors]])
    return ScanKernels(call, rule, local, "bfloat16", CLUSTER.device)


def test_the_products_of_a_scan_are_those_of_the_formula() -> None:
    """Per token 2 Q (g n + w) for the chunk's own rows and 4 n w for the states, w of all heads
    together. Backward scores, states, and what reads both are computed once more.
    """
    scan = kernels_of_scan(STATE)

    def flops(kernels: Iterable[Kernel]) -> float:
        products = [kernel.product for kernel in kernels if kernel.product is not None]
        return float(sum((2 * p.batch * p.m * p.n * p.k)[0] for p in products)) / 1024

    ahead = scan.ahead()
    back = scan.back()
    assert (len(ahead), len(back)) == (scan_kernels.FORWARD, scan_kernels.BACKWARD)
    assert flops(ahead) == 2.0 * (128 * (8 * 128 + 2048) + 2 * 128 * 2048)
    assert flops(back) == 2.0 * (128 * (3 * 8 * 128 + 3 * 2048) + 5 * 128 * 2048)


def test_states_are_written_wide_and_passed_on_narrow() -> None:
    """Longer chunks have fewer states, whose bytes are most of what a pass moves."""
    states = 8 * 32 * 64 * 128  # elements of 8 chunks of 32 heads
    short, long = (kernels_of_scan(replace(STATE, chunk=size)).ahead() for size in (128, 256))
    assert short[2].nbytes[0] == states * (4 + 2)
    assert long[2].nbytes[0] == short[2].nbytes[0] / 2
    assert short[1].nbytes[0] == 1024 * (2048 + 8 * 128) * 2 + states * 4


def test_kernels_of_a_scan_compute_it_again_backward_and_keep_nothing() -> None:
    shape = replace(SHAPE, layers=1, pattern="M")
    c = Configuration(global_batch=1).run_by(CORE)
    parts = Parts(shape, c, CLUSTER.sized(1), places_of(c, CLUSTER.sized(1)), kinds=("state",))
    steps = [
        s
        for s in parts.program().steps
        if isinstance(s, Compute) and s.operator.name.startswith("layers.")
    ]
    actual = parts.parts()["state"]
    each = {step.operator.name: parts.operator(step) for step in steps}
    again = sum(
        seconds.forward
        for name, seconds in each.items()
        if SCAN in name and not name.endswith(".chunks")
    )
    assert again > 0
    assert actual.backward > sum(seconds.backward for seconds in each.values()) + 0.99 * again
    scan = next(seconds for name, seconds in each.items() if name.endswith(".chunks"))
    assert 2 * scan.forward < scan.backward < 5 * scan.forward, "with its own repetition, once"
    rows = 1024 * 2  # elements of a column, and bytes of one
    kept = working(shape, c, CLUSTER)["state"].saved
    # Rows before and behind the norm, what the first product makes, the scan's result before and
    # behind its norm; no chunk, no state.
    assert kept == pytest.approx(
        rows * (2 * 1024 + 8 * (2 * 256 + 2 * 128 + 4) + 2 * 2048), rel=0.1
    )


@pytest.mark.parametrize("tensor", [2, 4])
def test_groups_are_split_over_tensor_parallel_ranks(tensor: int) -> None:
    c = Configuration(global_batch=8, micro_batch=8, tensor=tensor, sequence_parallel=True)
    c = c.run_by(CORE)
    one, split = (
        price(SHAPE, x, CLUSTER) for x in (replace(c, tensor=1, sequence_parallel=False), c)
    )
    assert split.arithmetic < 1.6 * one.arithmetic / tensor
    assert split.allocated[0] < 1.5 * one.allocated[0] / tensor


def test_experts_may_work_in_fewer_dims_than_the_model() -> None:
    narrow = replace(SHAPE, expert_hidden=256)
    less = 16 * 2 * 512 * (1024 - 256) - 2 * 1024 * 256
    assert parameters(SHAPE) - parameters(narrow) == less
    c = Configuration(global_batch=64, micro_batch=8, data=8, expert=8).run_by(CORE)
    whole, small = (
        Parts(s, c, CLUSTER, places_of(c, CLUSTER), kinds=("experts alone",))
        .parts()["experts alone"]
        .travel_forward
        for s in (SHAPE, narrow)
    )
    assert small < 0.5 * whole, "rows travel narrow"


def test_modules_that_predict_further_have_layers_of_a_pattern() -> None:
    none, two = (parameters(replace(SHAPE, mtp=n, mtp_pattern="*E")) for n in (0, 2))
    extra = parameters(replace(SHAPE, layers=2, pattern="*E")) - 2 * 4096 * 1024 - 1024
    assert two - none == 2 * (extra + 2 * 1024 * 1024 + 3 * 1024)


HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "intermediate_size": 4096,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_latent_size": 256,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}


def of(folder: Path, config: dict[str, Any]) -> Shape:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Shape.of(folder / "config.json", sequence=512)


def test_hybrid_configurations_are_read(tmp_path: Path) -> None:
    actual = of(tmp_path, HYBRID)
    assert actual.state == StateSpace(heads=32, width=64, size=128, groups=8, chunk=256)
    assert (actual.pattern, actual.gated, actual.position, actual.mtp, actual.mtp_pattern) == (
        "M-*E",
        False,
        "none",
        1,
        "*E",
    )
    assert (
        actual.experts,
        actual.top_k,
        actual.expert_ffn,
        actual.shared_ffn,
        actual.expert_hidden,
    ) == (16, 6, 512, 1024, 256)
    assert (
        price(actual, Configuration(global_batch=8, data=8, expert=8).run_by(CORE), CLUSTER).step
        > 0
    )


@pytest.mark.parametrize(
    ("config", "pattern", "heads"),
    [
        ({"model_type": "mamba2", "num_heads": 32, "head_dim": 64, "state_size": 64}, "MMMM", 32),
        (
            {
                "model_type": "bamba",
                "attn_layer_indices": [2],
                "mamba_n_heads": 32,
                "mamba_d_head": 64,
            },
            "M-M-*-M-",
            32,
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "num_local_experts": 8,
                "mamba_d_head": 128,
                "shared_intermediate_size": 256,
                "layer_types": ["mamba", "attention", "mamba", "mamba"],
            },
            "ME*EMEME",
            16,
        ),
    ],
)
def test_other_models_of_state_spaces_are_read(
    config: dict[str, Any], pattern: str, heads: int, tmp_path: Path
) -> None:
    base = {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "vocab_size": 1000,
        "intermediate_size": 2048,
    }
    actual = of(tmp_path, base | config)
    assert (actual.pattern, actual.layers) == (pattern, len(pattern))
    assert actual.state is not None and actual.state.heads == heads
    assert transformer(actual, batch=1).graph.operators


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"pattern": "M-M*"}, "4 layers, not 6"),
        ({"pattern": "M-M*MX"}, "X"),
        ({"state": None}, "their sizes"),
        ({"experts": 0}, "their number"),
    ],
)
def test_patterns_that_say_too_little_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replace(SHAPE, **changed)


def test_heads_that_do_not_make_equal_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="equal groups"):
        StateSpace(heads=6, width=64, size=128, groups=4)
    with pytest.raises(ModelError, match=r"config\.json: .*X"):
        of(tmp_path, HYBRID | {"hybrid_override_pattern": "M-X"})


def test_elements_of_four_bits_are_aligned_without_their_scales() -> None:
    """Rows of 18,560 elements are 9,280 bytes, a multiple of 16; with their scales they are 10,440,
    which is none.
    """
    device = load_cluster("dgx-b200").device
    shapes = [
        Product(batch=np.ones(1), m=np.full(1, 8192.0), n=np.full(1, n), k=np.full(1, 4096.0))
        for n in (18560.0, 18432.0)
    ]
    one, other = (product_seconds(shape, "float4", device, itemsize=0.5625) for shape in shapes)
    assert one[0] / other[0] == pytest.approx(1.0, abs=0.1)
