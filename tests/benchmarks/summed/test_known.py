"""Known configurations: their programs are the schemes' programs, equal layers are priced once, and
steps add up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopar.costmodel import collective_time, load_cluster
from autopar.costmodel.frameworks import FRAMEWORKS, Habits, Kernels
from autopar.costmodel.step.estimate import estimate
from autopar.errors import UsageError
from autopar.order.scheduled import scheduled
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.summed.configuration import Configuration
from benchmarks.validating.summed.exposed_messages import exposed
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.part_seconds import Parts
from benchmarks.validating.summed.priced_step import price
from benchmarks.validating.summed.stage_memory import working

CLUSTER = load_cluster("dgx-a100-80g")
SHAPE = Shape(layers=4, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=51200, sequence=512)
LLAMA = replace(
    SHAPE,
    kv_heads=4,
    ffn=2816,
    gated=True,
    tied=False,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
)


def parts_of(shape: Shape, c: Configuration, layers: int = 1) -> Parts:
    cluster = CLUSTER.sized(c.devices)
    return Parts(shape, c, cluster, places_of(c, cluster), kinds=("dense",) * layers)


def collectives(shape: Shape, c: Configuration) -> Counter[tuple[str, str]]:
    """Collectives of activations that one layer issues, by phase and kind."""
    issued = scheduled(parts_of(shape, c).program()).collectives()
    return Counter(
        (x.phase, x.kind)
        for x in issued
        if x.tensor.startswith("layers") and x.nbytes > 1e5 and not x.tensor.endswith("weight")
    )


@pytest.mark.parametrize("shape", [SHAPE, LLAMA])
@pytest.mark.parametrize("attention", ["fused", "flash2"])
def test_megatron_reduces_twice_forward_and_twice_backward(shape: Shape, attention: str) -> None:
    c = Configuration(global_batch=8, micro_batch=8, tensor=4, kernels=Kernels(attention=attention))
    extra = (
        1 if shape is LLAMA else 0
    )  # the query and the key-value product share the norm's output, one redistribution
    assert collectives(shape, c) == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}, (
        extra
    )


def test_sequence_parallelism_gathers_and_scatters_the_same_bytes() -> None:
    c = Configuration(global_batch=8, micro_batch=8, tensor=4, kernels=Kernels(attention="flash2"))
    split = replace(c, sequence_parallel=True)
    assert collectives(SHAPE, split) == {
        (phase, kind): 2
        for phase in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter")
    }
    whole, pieces = (
        [
            x.nbytes
            for x in scheduled(parts_of(SHAPE, one).program()).collectives()
            if x.tensor.startswith("layers") and x.nbytes > 1e5
        ]
        for one in (c, split)
    )
    assert 2 * sum(whole) == sum(pieces), (
        "an all-reduce counts its buffer once, its two halves each count it"
    )


def test_zero_3_moves_half_as_much_again_as_data_parallelism() -> None:
    c = Configuration(global_batch=8, micro_batch=1, data=8)
    plain = parts_of(SHAPE, c).parts()["dense"]
    split = parts_of(SHAPE, replace(c, zero=3)).parts()["dense"]
    assert plain.gathered == 0
    gradients = split.parameters * 2
    # All-reduce: twice the gradients. ZeRO-3: two gathers of the weights and one scatter of the
    # gradients.
    assert 2 * split.gathered + gradients == pytest.approx(1.5 * 2 * gradients, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_are_priced_once_and_counted_often(sequence_parallel: bool) -> None:
    kernels = Kernels(attention="fused")
    c = Configuration(
        global_batch=4,
        micro_batch=2,
        data=2,
        tensor=4,
        sequence_parallel=sequence_parallel,
        kernels=kernels,
    )
    one = parts_of(SHAPE, c).parts()
    four = parts_of(SHAPE, c, layers=4).parts()
    for name in (
        "forward",
        "backward",
        "weight",
        "moved_forward",
        "moved_backward",
        "parameters",
        "issued_forward",
    ):
        assert getattr(four["dense"], name) == pytest.approx(
            4 * getattr(one["dense"], name), rel=1e-9
        )
        assert getattr(four["head"], name) == pytest.approx(getattr(one["head"], name), rel=1e-9)


def test_the_parts_are_those_of_the_ordinary_estimate() -> None:
    """No second model: the same program through `estimate` takes the same seconds but for the loss,
    whose kernels are the framework's.
    """
    kernels = Kernels(attention="fused")
    habits = Habits(compiled=True)
    c = Configuration(global_batch=2, micro_batch=2, tensor=4, kernels=kernels, habits=habits)
    parts = parts_of(SHAPE, c, layers=4)
    actual = parts.parts()
    whole = estimate(parts.program(), parts.analysis, parts.prices, optimizer="adamw")
    assert sum(part.forward for part in actual.values()) == pytest.approx(whole.forward, rel=0.01)
    # Autograd's sums of gradients and what the loss does otherwise come on top.
    assert whole.backward < sum(part.backward for part in actual.values()) < 1.15 * whole.backward


def test_a_pipeline_of_equal_stages_takes_its_bubble() -> None:
    shape = replace(SHAPE, layers=32, vocab=64)
    alone = price(shape, Configuration(global_batch=16), CLUSTER)
    split = price(
        shape,
        Configuration(global_batch=16, pipeline=4, habits=Habits(overlap_sends=True)),
        CLUSTER,
    )
    assert split.pipeline == pytest.approx(alone.pipeline / 4 * (16 + 3) / 16, rel=0.03)


def test_recomputing_everything_repeats_the_forward_pass_and_keeps_little() -> None:
    c = Configuration(global_batch=4, micro_batch=4, kernels=Kernels(attention="fused"))
    none, some, full = (
        price(SHAPE, replace(c, recompute=name), CLUSTER) for name in ("none", "selective", "full")
    )
    assert none.backward[0] < some.backward[0] < full.backward[0]
    assert none.memory > some.memory > full.memory
    for tensor in (1, 2, 4):
        actual = working(SHAPE, replace(c, recompute="full", tensor=tensor), CLUSTER)
        assert actual["dense"].saved == 4 * 512 * 1024 * 2, "only the input of a layer"


def test_activations_of_a_layer_follow_korthikanti() -> None:
    """s b h (34 + 5 a s / h) bytes for a layer, over t with sequence parallelism, 34 s b h / t with
    selective recompute (2205.05198).
    """
    c = Configuration(
        global_batch=2, micro_batch=2, kernels=Kernels(attention="fused"), dtype="float16"
    )
    rows = 512 * 2 * 1024
    square = 16 * 512 * 512 * 2
    assert working(SHAPE, c, CLUSTER)["dense"].saved == pytest.approx(
        34 * rows + 5 * square, rel=0.03
    )
    split = replace(c, tensor=4, sequence_parallel=True, habits=Habits(regather=True))
    assert working(SHAPE, split, CLUSTER)["dense"].saved == pytest.approx(
        (34 * rows + 5 * square) / 4, rel=0.03
    )
    assert working(SHAPE, replace(split, recompute="selective"), CLUSTER)[
        "dense"
    ].saved == pytest.approx(34 * rows / 4, rel=0.05)


def test_a_collective_under_cover_slows_the_cover_down() -> None:
    assert exposed(1.0, 0.0) == 1.0
    assert 0 < exposed(1.0, 5.0) < 0.2
    assert exposed(3.0, 1.0) == pytest.approx(2.0 + exposed(1.0, 1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute": "some"}, "unknown recompute 'some': valid are none, selective, full"),
        ({"zero": 4}, "ZeRO stages are 0 to 3"),
        ({"data": 3}, "no multiple of 3 x 1"),
        ({"tensor": 0}, "tensor must be at least 1"),
        ({"data": 4, "expert": 3}, "do not make groups of 3 expert-parallel ranks x 1"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'"),
    ],
)
def test_impossible_configurations_are_errors(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(Configuration(global_batch=8), **change)  # type: ignore[arg-type]


def test_an_unknown_way_to_deal_out_layers_is_an_error() -> None:
    with pytest.raises(
        UsageError, match="unknown partition 'all': valid are even, greedy, items, balanced"
    ):
        Habits(partition="all")


def test_degrees_that_do_not_divide_are_errors_that_name_the_operator() -> None:
    with pytest.raises(UsageError, match=r"embed.*cannot be split evenly"):
        price(SHAPE, Configuration(global_batch=8, tensor=3), CLUSTER)
    with pytest.raises(
        UsageError, match="8 pipeline stages, with their chunks, are more than the 4 layers"
    ):
        price(SHAPE, Configuration(global_batch=8, pipeline=8), CLUSTER)
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        Kernels(attention="flash")


@pytest.mark.parametrize("shape", [SHAPE, LLAMA])
def test_context_parallel_ranks_send_keys_around_and_reduce_gradients(shape: Shape) -> None:
    c = Configuration(global_batch=8, context=4, tensor=2, sequence_parallel=True)
    cluster = CLUSTER.sized(c.devices)
    program = Parts(shape, replace(c, global_batch=1), cluster, places_of(c, cluster)).program()
    assert (
        Counter((x.phase, x.kind) for x in scheduled(program).collectives())["forward", "send"] == 3
    )
    alone = price(shape, replace(c, context=1), CLUSTER)
    split = price(shape, c, CLUSTER)
    assert alone.reduction == 0 < split.reduction
    sharded = price(shape, replace(c, zero=1), CLUSTER)
    assert sharded.update == pytest.approx(split.update / 4)
    assert sharded.memory < split.memory
    gathered = price(shape, replace(c, zero=3), CLUSTER)
    assert gathered.reduction == 0 and gathered.memory < sharded.memory


def test_experts_split_over_ranks_move_their_rows_by_all_to_all() -> None:
    """Counts and two all-to-alls forward, two backward, for each layer of experts; their weights
    lie on a share of the ranks.
    """
    shape = replace(SHAPE, experts=8, expert_every=2, expert_ffn=2048, bias=False)
    c = Configuration(global_batch=8, micro_batch=1, data=8, expert=4)
    cluster = CLUSTER.sized(c.devices)
    parts = Parts(shape, c, cluster, places_of(c, cluster), kinds=("dense", "experts"))
    part = parts.parts()["experts"]
    rows = 2 * 1024 * 2 * parts.shape.sequence
    whole = 2 * collective_time("all_to_all", rows, 4, level="nvlink", cluster=cluster)
    counts = collective_time("all_gather", 8 * 4 * 8, 4, level="nvlink", cluster=cluster)
    assert part.travel_backward == pytest.approx(float(whole))
    assert part.travel_forward == pytest.approx(float(whole + counts))
    alone = price(shape, replace(c, expert=1), CLUSTER)
    assert parts.parts()["experts"].experts == 2 * 1024 * 2048 * 8 / 4
    assert price(shape, c, CLUSTER).memory < alone.memory


def test_experts_cost_as_many_rows_as_they_are_given() -> None:
    """No one-hot products: twice the sequence is twice the time of the experts, but for their
    launches.
    """
    shape = replace(SHAPE, experts=8, expert_ffn=2048, bias=False)
    actual = [
        parts_of(
            replace(shape, sequence=s), Configuration(global_batch=8, micro_batch=8)
        ).model.graph
        for s in (512, 1024)
    ]
    assert len(actual[0].operators) == len(actual[1].operators)


@pytest.mark.parametrize(("products", "each"), [("", 2), ("float8_block", 4)])
def test_experts_are_issued_one_by_one(products: str, each: int) -> None:
    """Each expert of a rank has two products, each with a cast of its rows if they are narrow."""
    c = Configuration(global_batch=4, data=4, expert=4, kernels=Kernels(products=products))
    cluster = load_cluster("dgx-h100").sized(4)

    def issued(experts: int) -> float:
        shape = replace(LLAMA, experts=experts, top_k=4, expert_ffn=512)
        return (
            Parts(shape, c, cluster, places_of(c, cluster), kinds=("experts",))
            .parts()["experts"]
            .issued_forward
        )

    assert issued(32) - issued(16) == each * (32 - 16) / 4
    assert issued(16) > 20 + each * 4, "sorting and exchanges besides"


def test_experts_may_recompute_what_is_between_their_products() -> None:
    """The input of the second product, rows of 512 elements of 2 bytes; in the fused activation,
    all of what is between is inside.
    """
    shape = replace(LLAMA, experts=16, top_k=4, expert_ffn=512)
    c = Configuration(
        global_batch=2,
        micro_batch=2,
        recompute="selective",
        habits=Habits(selective=("nothing",), fused=True),
    )
    again = replace(c, recompute_modules=("moe_act",))
    kept, less = (working(shape, one, CLUSTER)["experts"].saved for one in (c, again))
    assert kept - less == pytest.approx(2 * 512 * 4 * 512 * 2, rel=0.01)


@pytest.mark.parametrize("preset", ["mi300x", "mi355x", "tpu-v5p", "trn2", "ascend-910c"])
def test_every_framework_is_priced_on_devices_that_nobody_measured(preset: str) -> None:
    cluster = load_cluster(preset)
    c = Configuration(global_batch=64, micro_batch=1, data=8)
    steps = {
        name: price(LLAMA.run_by(framework), c.run_by(framework), cluster).step
        for name, framework in FRAMEWORKS.items()
    }
    assert all(0 < step < 60 for step in steps.values())
    bare = replace(cluster.device, kernels=None, matmul_fraction=0.5, half_size=128.0)
    older = replace(bare, attention={"flash2.forward": 0.4, "flash2.backward": 0.3})
    core = FRAMEWORKS["megatron-core"]
    assert price(LLAMA.run_by(core), c.run_by(core), replace(cluster, device=older)).step > 0
