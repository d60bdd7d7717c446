"""Seconds of the host from steps of small trainings: what made the steps is told again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from autopar.analysis.measurements.host_calibration import small_trainings, with_figures, with_host
from autopar.analysis.program.step_parts import stepping_of
from autopar.costmodel import dump, load_cluster
from autopar.costmodel.calibration.host_times import fit_host
from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.costmodel.step.estimate import estimate
from autopar.sharding.analysis import analyse

TRUTH = dict(zip(HOST_ACTIONS, (1e-3, 2e-4, 8e-6, 5e-5, 3e-5, 2e-5, 1e-4, 6e-5), strict=True))


def test_figures_that_made_the_steps_are_found() -> None:
    """Also where a part of them hides under the rest."""
    rng = np.random.default_rng(3)
    counts = rng.uniform(0, 50, (10, len(TRUTH)))
    kernels = rng.uniform(1e-3, 1e-2, 10)

    def price(host: Mapping[str, float]) -> list[float]:
        seconds = np.array([host[action] for action in HOST_ACTIONS])
        # Half of the collectives' seconds hide, as long as there is anything to hide under.
        hidden = np.minimum(counts[:, 3] * seconds[3] / 2, 5e-4)
        return list(kernels + counts @ seconds - hidden)

    fitted = fit_host(price, [(step,) * 3 for step in price(TRUTH)])
    assert fitted.seconds == pytest.approx(TRUTH, rel=1e-3)
    assert fitted.source.startswith("measured: steps of 10 small trainings")


def test_no_figure_is_below_zero_where_kernels_were_priced_too_high() -> None:
    fitted = fit_host(lambda host: [2e-3 + sum(host.values())], [(1e-3,) * 3])
    assert set(fitted.seconds.values()) == {0.0}


@pytest.fixture(scope="module")
def trainings() -> list[Any]:
    return small_trainings(2)


def test_steps_that_follow_from_figures_are_priced_as_they_were(
    trainings: list[Any], tmp_path: Any
) -> None:
    """Whichever figures are found: some plans tell a call and its passes apart only a little."""
    cluster = load_cluster("local-cpu").sized(2)
    known = with_figures(cluster, TRUTH)
    priced = {
        one.name: stepping_of(one.plan, analyse(one.model.graph, train=True)).seconds
        for one in trainings
    }
    steps = {name: (price(known),) * 3 for name, price in priced.items()}
    actual = with_host(cluster, trainings, steps)
    without = with_figures(cluster, {})
    for price in priced.values():
        assert price(actual) == pytest.approx(price(known), rel=0.03)
        assert price(without) < 0.8 * price(known)
    path = tmp_path / "here.json"
    path.write_text(dump(actual))
    assert load_cluster(path).device.host == actual.device.host
    assert load_cluster(path).sources["device.host.pass"].kind == "measured"


def test_a_plan_is_priced_as_its_stages_are_played(trainings: list[Any]) -> None:
    """The cutter of a pipeline and the played stages count the same work of the host."""
    from autopar.api import plan_loaded

    known = with_figures(load_cluster("local-cpu").sized(2), TRUTH)
    (staged,) = (one for one in trainings if one.name == "stages")
    asked = {"stages": 2, "micro_batches": 4, "schedule": "1f1b"}
    plan = plan_loaded(staged.model, cluster=known, devices=2, **asked).plan
    stepping = stepping_of(plan, analyse(staged.model.graph, train=True))
    assert plan.predicted.step == pytest.approx(stepping.seconds(known))
    # Five turns of both passes, and a call.
    waited = 10 * TRUTH["pass"] + TRUTH["step"]
    without = {**TRUTH, "pass": 0.0, "step": 0.0}
    assert plan.predicted.step - stepping.seconds(with_figures(known, without)) == pytest.approx(
        waited
    )


def test_operators_take_the_host_in_both_passes(trainings: list[Any]) -> None:
    (few,) = (one for one in trainings if one.name == "few operators")
    step = stepping_of(few.plan, analyse(few.model.graph, train=True))
    cluster = load_cluster("local-cpu").sized(2)
    started = with_figures(cluster, {"operator": 1e-4})
    before, after = (
        estimate(step.micro, step.part, step.prices(one), optimizer="adamw")
        for one in (with_figures(cluster, {}), started)
    )
    count = len(few.plan.operators)
    assert after.forward - before.forward == pytest.approx(count * 1e-4)
    assert after.backward - before.backward == pytest.approx(count * 1e-4)
