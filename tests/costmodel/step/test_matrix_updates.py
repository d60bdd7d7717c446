"""Prices of updates of whole matrices: products by hand, the slowest rank, memory, and stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.api import Planned, plan_loaded
from autopar.configured import load_any
from autopar.costmodel import load_cluster
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.products import Product
from autopar.costmodel.step.matrix_updates import newton_schulz_seconds, share_of, slowest_seconds
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.ir import Role, Tensor
from autopar.order.owners import owners_of
from autopar.planning.stages.operator_costs import operator_costs
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import R, S
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.schedule import PLAIN

WIDTH = 256


def _net(layers: int) -> nn.Module:
    hidden = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 8, bias=False))


def _planned(layers: int, **options: object) -> Planned:
    model = load_any(_net(layers), ModelOptions(train=True), (torch.ones(16, WIDTH),))
    given: dict[str, Any] = {"cluster": "dgx-h100", "optimizer": "muon", "devices": 4, **options}
    return plan_loaded(model, **given)


def _matrix(*shape: int) -> Tensor:
    return Tensor(name="w", shape=shape, dtype="float32", role=Role.PARAMETER, trainable=True)


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096)])
def test_an_update_is_fifteen_products(shape: tuple[int, int]) -> None:
    device = load_cluster("dgx-h100").device

    def product(m: int, n: int, k: int) -> float:
        batch, rows, columns, inner = (np.array([float(size)]) for size in (1, m, n, k))
        sizes = Product(batch=batch, m=rows, n=columns, k=inner)
        return float(product_seconds(sizes, "bfloat16", device, itemsize=2)[0])

    products = product(1024, 1024, 4096) + product(1024, 1024, 1024) + product(1024, 4096, 1024)
    passed = 6 * 4096 * 1024 / (device.memory_bandwidth * device.memory_fraction)
    wanted = 5 * products + passed + 2 * device.launch
    assert newton_schulz_seconds(*shape, device) == pytest.approx(wanted, rel=1e-12)


def test_shares_add_up_to_the_mean_of_owners() -> None:
    """Four equal matrices on four ranks: no rank is slower than the mean."""
    cluster = load_cluster("dgx-h100").sized(4)
    mesh = Mesh(axes=(Axis(name="gpu", size=4, level=cluster.levels[0].name),))
    prices = MeshPrices(cluster=cluster, mesh=mesh)
    tensor = _matrix(1024, 1024)
    for layout in ((R,), (S(0),), (S(1),)):
        share = share_of(tensor, layout, prices)
        assert share.products == pytest.approx(share.largest / 4, rel=1e-12)
        assert share.sent > 0
    # Copies share whole updates; shards go to owners and come back.
    kept, split = (share_of(tensor, layout, prices).sent for layout in ((R,), (S(0),)))
    assert kept > split
    experts = share_of(_matrix(8, 1024, 1024), (S(0),), prices)
    assert experts.sent == 0
    assert experts.products == pytest.approx(2 * experts.largest, rel=1e-12)


def test_the_step_waits_for_the_slowest_owner() -> None:
    """Five equal matrices on four ranks: one rank has two."""
    device = load_cluster("dgx-h100").device
    matrices = [_matrix(512, 512)]
    owners = owners_of(Mesh.of(a=4), matrices, {"w": (R,)})
    assert slowest_seconds(owners, device) == newton_schulz_seconds(512, 512, device)
    five = [Tensor(name=f"w{i}", shape=(512, 512), dtype="float32") for i in range(5)]
    owners = owners_of(Mesh.of(a=4), five, {one.name: (R,) for one in five})
    assert slowest_seconds(owners, device) == 2 * newton_schulz_seconds(512, 512, device)
    assert owners.imbalance == pytest.approx(2 / (5 / 4))


def test_plans_count_one_momentum_and_price_what_they_send() -> None:
    muon, adamw = (_planned(4, scheme="zero1", optimizer=o).plan for o in ("muon", "adamw"))
    hidden = 4 * WIDTH * WIDTH * 4 / 4
    held = [plan.predicted.memory_parts["optimizer"] for plan in (muon, adamw)]
    assert held[1] - held[0] == pytest.approx(hidden, rel=1e-9)
    sent = [c for c in muon.collectives if c.phase == "update"]
    assert [c.kind for c in sent] == ["all_to_all"] * 2
    assert [c.nbytes for c in sent] == [int(2 * hidden / 4)] * 2
    assert not [c for c in adamw.collectives if c.phase == "update"]
    assert muon.predicted.update > adamw.predicted.update


def test_the_head_of_a_model_is_no_matrix() -> None:
    planned = _planned(2)
    analysis = analyse(planned.model.graph, train=True)
    assert analysis.updated_whole("muon") == {"0.weight", "1.weight"}
    assert not analysis.updated_whole("adamw")


@pytest.mark.parametrize(("layers", "longer"), [(1, 0.5), (2, 0.0), (3, 0.0)])
def test_a_stage_takes_as_long_as_its_largest_matrix(layers: int, longer: float) -> None:
    """One matrix on two ranks: its owner works, the other waits."""
    planned = _planned(layers, devices=2, scheme="data")
    analysis = analyse(planned.model.graph, train=True)
    prices = MeshPrices(cluster=planned.cluster, mesh=planned.plan.mesh_)
    costs = operator_costs(
        planned.plan.program(analysis), analysis, prices, optimizer="muon", schedule=PLAIN
    )
    own = newton_schulz_seconds(WIDTH, WIDTH, planned.cluster.device)
    uneven = costs.uneven(0, len(costs.update))
    assert uneven == pytest.approx(longer * own, rel=1e-9, abs=1e-15)
    assert costs.products.sum() == pytest.approx(layers * own / 2, rel=1e-9)
    assert costs.update.sum() > costs.products.sum()


def test_state_in_host_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="muon updates all matrices together"):
        _planned(2, offload="optimizer")
