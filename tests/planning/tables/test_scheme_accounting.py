"""The volumes that the literature states for the schemes known by name: as priced, and as issued on
real ranks.

Bytes are of the buffer by the convention of each collective; `sent` is what a rank sends of it in a
ring, (p - 1) / p of it, twice for an all-reduce. b, s, h: batch, sequence, hidden; p ranks, or q x
q, or q x q x q of them.
"""

from __future__ import annotations

import pytest

from autopar.frontends.load import LoadedModel
from autopar.frontends.torch.experts import join_experts
from autopar.ir import Operator
from autopar.order.execution import Execution, execution
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.torch_versions import CHECKS_COLLECTIVES
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import P, Placement, S
from autopar.sharding.mesh import Mesh, degree_of
from autopar.sharding.program import Program
from autopar.sharding.schedule import PLAIN, Schedule
from tests.planning.accounting import (
    BATCH,
    BSH,
    DATA,
    HH,
    HIDDEN,
    ITEMSIZE,
    MEGATRON,
    MEGATRON_SEQUENCE,
    ONE_BY_ONE,
    SEQUENCE,
    SUMMA,
    ULYSSES,
    Experts,
    FeedForward,
    Moved,
    Split,
    counted,
    model_of,
    priced,
    program,
    program_of,
    sent,
    sorted_experts,
    transformer,
)

RANKS = [2, 4]


def one(p: int) -> Mesh:
    """A mesh of one axis."""
    return Mesh.of(x=p)


def parameters(built: Program) -> int:
    """Bytes of all parameters."""
    return sum(tensor.bytes for tensor in built.graph.parameters)


# --- one axis ---


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("layers", [1, 3])
def test_megatron_reduces_twice_a_layer_each_way(p: int, layers: int) -> None:
    """Shoeybi et al., arXiv:1909.08053, section 3: two all-reduces of b s h forward and two
    backward, and nothing else.
    """
    price = priced(program(transformer(layers), one(p), MEGATRON))
    assert counted(price) == {
        ("forward", "all_reduce", BSH): 2 * layers,
        ("backward", "all_reduce", BSH): 2 * layers,
    }


@pytest.mark.parametrize("p", RANKS)
def test_sequence_parallelism_moves_the_same_bytes(p: int) -> None:
    """Korthikanti et al., arXiv:2205.05198, section 4.2.2: each all-reduce becomes an all-gather
    and a reduce-scatter.

    Beside them the gradients of the norms' weights, which the ranks take of their own rows, are
    added up.
    """
    layers = 2
    whole, split = (
        priced(program(transformer(layers), one(p), scheme))
        for scheme in (MEGATRON, MEGATRON_SEQUENCE)
    )
    pairs = {
        (phase, kind, BSH): 2 * layers
        for phase in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter")
    }
    assert counted(split, parameter=False) == pairs
    assert sent(split, parameter=False) == pytest.approx(sent(whole))
    assert counted(split, parameter=True) == {
        ("backward", "all_reduce", layers * 4 * HIDDEN * ITEMSIZE): 1
    }


@pytest.mark.parametrize("p", RANKS)
def test_data_parallel_and_sharded_storage_move_the_same(p: int) -> None:
    """Rajbhandari et al., arXiv:1910.02054, section 7: 2 Ψ for data parallelism, and for its stages
    1 and 2.
    """
    whole, kept = (program(transformer(2), one(p), DATA, storage=storage) for storage in ((), (0,)))
    volume = 2 * (p - 1) / p * parameters(whole)
    assert {(m.phase, m.kind) for m in priced(whole)} == {("backward", "all_reduce")}
    assert sent(priced(whole)) == pytest.approx(volume)
    assert {(m.phase, m.kind) for m in priced(kept)} == {
        ("forward", "all_gather"),
        ("backward", "reduce_scatter"),
    }
    assert sent(priced(kept)) == pytest.approx(volume)
    assert sent(priced(kept), phase="forward") == sent(priced(kept), phase="backward")


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("parts", [1, 4])
def test_gathering_again_takes_half_as_much_more(p: int, parts: int) -> None:
    """Rajbhandari et al., section 7.2.2: 3 Ψ for stage 3. Of several micro-batches each gathers
    twice and scatters its gradients.

    Stage 1 gathers and scatters once a step, stage 2 scatters after every micro-batch.
    """
    less, more = (
        program(transformer(layers, norm=False, bias=False), one(p), DATA, storage=(0,))
        for layers in (1, 2)
    )

    def layer(schedule: Schedule, **wanted: str) -> float:
        return sent(priced(more, schedule), **wanted) - sent(priced(less, schedule), **wanted)

    unit = (p - 1) / p * 12 * HH
    times = {
        ("per_step", "whole"): 2,
        ("per_step", "shards"): 1 + parts,
        ("per_pass", "whole"): 3 * parts,
    }
    for (gathered, accumulated), count in times.items():
        schedule = Schedule(
            micro_batches=parts, gathered=gathered, accumulated=accumulated, unit_bytes=1
        )
        assert layer(schedule) == pytest.approx(count * unit)
    again = Schedule(micro_batches=parts, gathered="per_pass", unit_bytes=1)
    assert layer(again, kind="all_gather", phase="backward") == pytest.approx(parts * unit)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("layers", [1, 2])
def test_ulysses_exchanges_four_times_a_layer(p: int, layers: int) -> None:
    """Jacobs et al., arXiv:2309.14509, section 3.2: queries, keys, values and the output, 4 N h / p
    a layer; as much backward.
    """
    price = priced(program(transformer(layers), one(p), ULYSSES))
    assert counted(price, parameter=False) == {
        (phase, "all_to_all", BSH // p): 4 * layers for phase in ("forward", "backward")
    }
    forward = [m.nbytes for m in price if m.phase == "forward"]
    assert sum(forward) == layers * 4 * BSH // p


def dealt(operator: Operator) -> tuple[Placement]:
    """Experts split inside, rows outside."""
    return (S(0) if "bmm" in operator.kind or "gelu" in operator.kind else S(1),)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("layers", [1, 2])
def test_experts_of_equal_capacity_exchange_twice(p: int, layers: int) -> None:
    """Lepikhin et al., arXiv:2006.16668, section 3.2: rows go to their experts and come back; as
    much backward.
    """
    experts = 4
    capacity = 8
    model = model_of([Experts(experts) for _ in range(layers)], experts, capacity, HIDDEN)
    price = priced(program_of(model.graph, one(p), dealt))
    rows = experts * capacity * HIDDEN * ITEMSIZE // p
    assert counted(price, parameter=False) == {
        (phase, "all_to_all", rows): 2 * layers for phase in ("forward", "backward")
    }
    assert {m.nbytes for m in price if m.parameter} == {layers * HIDDEN * ITEMSIZE}, (
        "the experts' own weights are not reduced"
    )


@pytest.mark.parametrize("p", RANKS)
def test_rows_of_sorted_experts_travel_once(p: int) -> None:
    """Lepikhin et al., arXiv:2006.16668, section 3.2, where rows are sorted and not of equal
    number: there and back, as much backward.

    Before they leave, every rank tells how many it has for each expert.
    """
    rows = 16
    experts = 4
    price = priced(
        program_of(
            join_experts(sorted_experts(experts, rows)), one(p), lambda op: (S(0),), travelling=True
        )
    )
    moved = rows * HIDDEN * ITEMSIZE // p
    assert counted(price, parameter=False) == {
        ("forward", "all_gather", p * experts * 8): 1,
        ("forward", "all_to_all", moved): 2,
        ("backward", "all_to_all", moved): 2,
    }


def test_rows_of_single_products_travel_for_each() -> None:
    """Where no layer is recognised, every product sends its rows there and back, two of them at the
    inner width.
    """
    rows = 16
    p = 2
    price = priced(program_of(sorted_experts(4, rows), one(p), lambda op: (S(0),), travelling=True))
    narrow, wide = (rows * width * ITEMSIZE // p for width in (HIDDEN, 2 * HIDDEN))
    assert counted(price, kind="all_to_all") == {
        (phase, "all_to_all", nbytes): 2
        for phase in ("forward", "backward")
        for nbytes in (narrow, wide)
    }


# --- two and three axes ---


@pytest.mark.parametrize("q", [2, 4])
def test_two_dims_as_optimus_states(q: int) -> None:
    """Xu et al., arXiv:2104.05343, table 1: blocks of 7 b s h + 12 h² in all over q = √p go along
    the rows and columns of the mesh.

    There every operand is broadcast again in the backward pass; here it is kept, so that the
    backward pass only adds up gradients: as much as forward. A block of the activations or weights
    is of 1 / p, and q - 1 others come in.
    """
    less, more = (
        priced(
            program(
                transformer(layers, norm=False, bias=False),
                Mesh.of(j=q, i=q),
                SUMMA,
                DATA,
                storage=(1,),
            ),
            ONE_BY_ONE,
        )
        for layers in (1, 2)
    )
    layer = counted(more) - counted(less)
    for phase, kind in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        assert {key[1] for key in layer if key[0] == phase} == {kind}
        assert (
            sum(nbytes * n for (when, _, nbytes), n in layer.items() if when == phase)
            == (7 * BSH + 12 * HH) // q
        )
    volume = sent(more) - sent(less)
    assert volume == pytest.approx(2 * (q - 1) * (7 * BSH + 12 * HH) / q**2)


def test_two_dims_scale_better_than_one() -> None:
    """Per device 1 / √p of the volume, where one dim moves as much however many ranks there are."""

    def layer(*splits: Split, mesh: Mesh, storage: tuple[int, ...] = ()) -> int:
        result = (
            priced(
                program(transformer(layers, norm=False, bias=False), mesh, *splits, storage=storage)
            )
            for layers in (1, 2)
        )
        less, more = (sum(m.nbytes for m in one) for one in result)
        return more - less

    flat = [layer(MEGATRON, mesh=one(p)) for p in (2, 4)]
    square = [layer(SUMMA, DATA, mesh=Mesh.of(j=q, i=q), storage=(1,)) for q in (2, 4)]
    assert flat[0] == flat[1] == 4 * BSH
    assert square[0] == 2 * square[1]


@pytest.mark.parametrize("depth", [2])
def test_depth_halves_the_activations(depth: int) -> None:
    """Wang et al., arXiv:2105.14500 (2.5-D): rows are split over the depth too; the weights'
    gradients are added up over it.
    """
    q = 2
    less, more = (
        priced(
            program(
                transformer(n, norm=False, bias=False),
                Mesh.of(j=q, i=q, d=depth),
                SUMMA,
                DATA,
                DATA,
                storage=(1,),
            )
        )
        for n in (1, 2)
    )
    assert sum(m.nbytes for m in more if m.axis == "j") - sum(
        m.nbytes for m in less if m.axis == "j"
    ) == 2 * 7 * BSH // (q * depth)
    assert (
        sum(m.nbytes for m in more if m.axis == "i") - sum(m.nbytes for m in less if m.axis == "i")
        == 2 * 12 * HH // q
    )
    assert {(m.phase, m.kind) for m in more if m.axis == "d"} == {("backward", "all_reduce")}
    assert (
        sum(m.nbytes for m in more if m.axis == "d") - sum(m.nbytes for m in less if m.axis == "d")
        == 12 * HH // q**2
    )


def cube(operator: Operator) -> tuple[Placement, ...]:
    """Axes j, l, i: columns, what is summed over, rows. The sum of one product is scattered to
    where the next one is gathered from.
    """
    word = operator.name.rpartition("/")[2].partition(".")[0]
    if operator.name.endswith("up/linear"):
        return S(2), P, S(0)
    if operator.name.endswith("down/linear"):
        return P, S(2), S(0)
    return (S(2), S(1), S(0)) if word == "gelu" else (S(1), S(2), S(0))


@pytest.mark.parametrize("q", [2, 4])
def test_three_dims_as_stated(q: int) -> None:
    """Bian et al., arXiv:2105.14450, section 3: with p = q³ input and weight are gathered and the
    result scattered, backward in reverse.

    Of a product Y = X A a device moves blocks of (|X| + |A| + |Y|) / q² each way, of which it sends
    (q - 1) / q.
    """
    graphs = (
        model_of(
            [FeedForward(norm=False, bias=False) for _ in range(n)], BATCH, SEQUENCE, HIDDEN
        ).graph
        for n in (1, 2)
    )
    less, more = (
        priced(program_of(graph, Mesh.of(j=q, l=q, i=q), cube, storage=(2,)), ONE_BY_ONE)
        for graph in graphs
    )
    products = 2 * (BSH + 4 * BSH + 4 * HH)
    layer = counted(more) - counted(less)
    for phase in ("forward", "backward"):
        assert (
            sum(nbytes * n for (when, _, nbytes), n in layer.items() if when == phase)
            == products // q**2
        )
    kinds = {
        (phase, kind): sum(n for key, n in layer.items() if key[:2] == (phase, kind))
        for phase, kind, _ in layer
    }
    assert kinds == {
        ("forward", "all_gather"): 4,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 4,
    }
    assert sent(more) - sent(less) == pytest.approx(2 * (q - 1) * products / q**3)


# --- issued ---


def issued(model: LoadedModel, built: Program, schedule: Schedule = PLAIN) -> list[Moved]:
    """The collectives that every rank issues in a step on real ranks, which are those that the
    program prices; the sum of the loss aside.
    """
    run = execution(built.assignment, analyse(model.graph, train=True), schedule)
    results = run_ranks(_on_rank, built.assignment.mesh.devices, model, run, timeout=120.0)
    assert not [wrong for wrong, _ in results if wrong]
    assert all(moved == results[0][1] for _, moved in results), "the ranks issue different volumes"
    return [m for m in results[0][1] if m.nbytes > ITEMSIZE]


def _on_rank(model: LoadedModel, run: Execution) -> tuple[str, list[Moved]]:
    groups = DeviceGroups.create(run.whole.program.assignment.mesh)
    module = ParallelModule(run, groups, model_values(model))
    assert model.inputs is not None
    with CollectiveLog() as log:
        outputs = module(*model.inputs)
        assert module.loss_index is not None
        outputs[module.loss_index].backward()
    sizes = groups.mesh.shape
    priced = [c for c in run.micro.collectives() if degree_of(c.axes, sizes) > 1]
    assert len(priced) == len(log.issued)
    moved = [
        Moved(phase=c.phase, kind=c.kind, group=degree_of(c.axes, sizes), nbytes=c.nbytes)
        for c in priced
    ]
    return log.mismatch(run, groups.rank), moved


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks verify every collective among each other before it runs."""
    if CHECKS_COLLECTIVES:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("strict")
def test_issued_on_one_axis() -> None:
    """The same volumes on four ranks: two layers under each scheme, and experts."""
    p = 4
    layers = 2
    both = ("forward", "backward")
    model = transformer(layers)
    assert counted(issued(model, program(model, one(p), MEGATRON))) == {
        (phase, "all_reduce", BSH): 2 * layers for phase in both
    }
    built = program(model, one(p), MEGATRON_SEQUENCE)
    norms = {("backward", "all_reduce", layers * 4 * HIDDEN * ITEMSIZE): 1}
    pairs = {
        (phase, kind, BSH): 2 * layers
        for phase in both
        for kind in ("all_gather", "reduce_scatter")
    }
    assert counted(issued(model, built)) == pairs | norms
    exchanged = {(phase, "all_to_all", BSH // p): 4 * layers for phase in both}
    ulysses = program(model, one(p), ULYSSES)
    assert counted(issued(model, ulysses)) == exchanged | {
        ("backward", "all_reduce", parameters(ulysses)): 1
    }
    for storage in ((), (0,)):
        data = program(model, one(p), DATA, storage=storage)
        assert sent(issued(model, data)) == pytest.approx(2 * (p - 1) / p * parameters(data))
    rows = model_of([Experts(4) for _ in range(layers)], 4, 8, HIDDEN)
    moved = 4 * 8 * HIDDEN * ITEMSIZE // p
    built = program_of(rows.graph, one(p), dealt)
    assert counted(issued(rows, built), kind="all_to_all") == {
        (phase, "all_to_all", moved): 2 * layers for phase in both
    }


@pytest.mark.usefixtures("strict")
def test_issued_under_schedules() -> None:
    """ZeRO 1, 2 and 3 on two ranks, parameter by parameter.

    The first queries, keys and values hand no gradient on, so their weights are not gathered again;
    nor is the last, which is still there.
    """
    p = 2
    weights = 2 * 12 * HH
    kept = 3 * HH + 4 * HH
    model = transformer(2, norm=False, bias=False)
    built = program(model, one(p), DATA, storage=(0,))
    cases = {
        (1, "per_pass", "whole"): 3 * weights - kept,
        (2, "per_step", "whole"): 2 * weights,
        (2, "per_step", "shards"): 3 * weights,
        (2, "per_pass", "whole"): 2 * (3 * weights - kept),
    }
    for (parts, gathered, accumulated), volume in cases.items():
        schedule = Schedule(
            micro_batches=parts, gathered=gathered, accumulated=accumulated, unit_bytes=1
        )
        assert sent(issued(model, built, schedule)) == pytest.approx((p - 1) / p * volume)


@pytest.mark.usefixtures("strict")
def test_issued_on_two_and_three_axes() -> None:
    """The blocks of Optimus on 2 x 2 ranks and of the cube on 2 x 2 x 2; the first layer's input is
    there on all ranks.
    """
    q = 2
    model = transformer(2, norm=False, bias=False)
    actual = issued(model, program(model, Mesh.of(j=q, i=q), SUMMA, DATA, storage=(1,)))
    for phase, given in (("forward", BSH), ("backward", BSH)):
        assert (
            sum(m.nbytes for m in actual if m.phase == phase)
            == (2 * (7 * BSH + 12 * HH) - given) // q
        )
    model = model_of(
        [FeedForward(norm=False, bias=False) for _ in range(2)], BATCH, SEQUENCE, HIDDEN
    )
    actual = issued(model, program_of(model.graph, Mesh.of(j=q, l=q, i=q), cube, storage=(2,)))
    for phase in ("forward", "backward"):
        assert (
            sum(m.nbytes for m in actual if m.phase == phase)
            == (2 * (10 * BSH + 8 * HH) - BSH) // q**2
        )
