"""Ordinary training scripts on a planned module: every script gives the values of one device, or
the same error on every rank.

One row alone: `-k "data and clip_norm"`. The rows of a scheme that are asked for run on one set of
ranks.
"""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.end_to_end.scripts import own
from tests.end_to_end.scripts.comparing import wrong
from tests.end_to_end.scripts.running import Outcomes, run_on_one_rank, run_original, run_planned
from tests.end_to_end.scripts.table import Script, scripts

FAST = ("data", "zero3")
FAST_ZERO3 = frozenset({"weights", "gradients", "agreement"})
"""The families of scripts to which it matters most that parameters are stored in shards; the other
rows of `zero3` are slow tests.
"""
MORE = (
    "megatron",
    "pipeline",
    "micro-batches",
    "search",
    "zero1",
    "zero2",
    "tensor",
    "megatron-sp",
    "pipeline-gpipe",
)
"""Schemes whose rows are slow tests; continuous integration runs the first four."""
CI = ("zero3", *MORE[:4])


def _marks(scheme: str, script: Script) -> list[pytest.MarkDecorator]:
    slow = scheme in MORE or script.slow or (scheme == "zero3" and script.family not in FAST_ZERO3)
    ci = scheme == "data" if script.slow else scheme in CI
    return [pytest.mark.slow] * slow + [pytest.mark.ci] * (slow and ci)


ROWS = [
    pytest.param(scheme, script, id=f"{scheme}-{script.name}", marks=_marks(scheme, script))
    for scheme in (*FAST, *MORE)
    for script in scripts().values()
    if script.expected_of(scheme) != "left out"
]


@pytest.fixture(autouse=True)
def unchecked_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking every collective among the ranks takes most of the time of models this small; what
    goes wrong shows in the values.
    """
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")


@pytest.fixture
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcomes]:
    """Runs the scripts that this session asks for under a name (a scheme, `original` or `one
    rank`), once for all workers.
    """
    asked: dict[str, dict[str, Script]] = {}
    for item in request.session.items:
        spec = getattr(item, "callspec", None)
        if spec is not None and isinstance(spec.params.get("script"), Script):
            script = spec.params["script"]
            for name in (spec.params["scheme"], script.reference):
                asked.setdefault(name, {})[script.name] = script

    # The workers of a session have folders of their own in one that is the session's.
    session = tmp_path_factory.getbasetemp()
    session = session.parent if hasattr(request.config, "workerinput") else session

    def run(name: str) -> Outcomes:
        wanted = [
            script
            for script in asked[name].values()
            if name not in ("original", "one rank") or script.expected != "refused"
        ]
        key = sha256(repr((name, [script.name for script in wanted])).encode()).hexdigest()[:16]
        path = session / f"scripts-{key}.pickle"
        if path not in READ:
            READ[path] = _once(
                path, lambda: RUN.get(name, lambda wanted: run_planned(wanted, name))(wanted)
            )
        return READ[path]

    return run


READ: dict[Path, Outcomes] = {}
"""What this process has read."""
RUN: dict[str, Callable[[list[Script]], Outcomes]] = {
    "original": run_original,
    "one rank": run_on_one_rank,
}


def _once(path: Path, make: Callable[[], Outcomes]) -> Outcomes:
    """The value of `make`, made by the first process that asks."""
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        loaded: Outcomes = pickle.loads(path.read_bytes())
        return loaded


@pytest.mark.parametrize(("scheme", "script"), ROWS)
def test_script(scheme: str, script: Script, outcomes: Callable[[str], Outcomes]) -> None:
    """One script under one scheme."""
    expected = script.expected_of(scheme)
    reference = (
        outcomes(script.reference).get(script.name) if script.expected != "refused" else None
    )
    told = wrong(script, expected, outcomes(scheme)[script.name], reference)
    assert not told, told


def _loss_under(plan: Plan) -> float | str:
    try:
        return float(autopar.parallelize(own.module(), plan, own.inputs())(*own.inputs()).detach())
    except AutoparError as error:
        return str(error)


def test_a_false_rule_in_a_plan_is_refused() -> None:
    """A rule that a file brings along is proven before anything is computed by it."""
    first, second = run_ranks(_loss_under, 2, own.plan_with_a_false_rule(), timeout=60.0)
    assert first == second and isinstance(first, str) and own.KIND in first


UNTOUCHED = """
from torch.distributed.tensor import DTensor
before = dict(vars(DTensor))
import autopar, autopar.runtime.parallelize, autopar.runtime.module.parallel_module
changed = [name for name, value in vars(DTensor).items() if before.get(name) is not value]
assert not changed, changed
"""


@pytest.mark.slow
@pytest.mark.ci
def test_importing_the_runtime_leaves_torch_as_it_is() -> None:
    """Other users of DTensor in the process get torch's own."""
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
