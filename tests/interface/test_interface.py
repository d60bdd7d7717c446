"""The functions of the Python interface: names, answers, and errors in Python's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from report_models import perceptrons
from torch import nn

import autopar
from autopar.errors import NoPlanFits, UsageError
from autopar.options.python_words import in_python

HERE = {"cluster": "dgx-h100", "devices": 2}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = str(tmp_path / "model.onnx")
    onnx.save(perceptrons(), path)
    return path


def test_the_surface_is_small_and_documented() -> None:
    assert set(autopar.__all__) == {
        "Cluster",
        "Plan",
        "compare",
        "convert",
        "estimate_memory",
        "explain",
        "import_plan",
        "parallelize",
        "plan",
        "report",
        "train",
        "verify",
    }
    for name in dir(autopar):
        assert getattr(autopar, name).__doc__, name
    assert not {"sys", "Any", "import_module", "Callable"} & set(dir(autopar))
    assert all(not name.startswith("_") for name in dir(autopar) if not name.startswith("__"))


def test_an_import_loads_neither_torch_nor_numpy() -> None:
    code = "import autopar, sys; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_of_the_same_name_do_not_replace_functions() -> None:
    from autopar.plan import Plan
    from autopar.report.tables import summary_lines

    assert autopar.Plan is Plan and callable(summary_lines)
    assert callable(autopar.plan) and callable(autopar.report)


def test_a_comparison_is_that_of_the_command_line(model: str) -> None:
    told = autopar.compare(model, schemes=["DDP", "TP2"], price=2.5, **HERE)
    assert told.plan == autopar.plan(model, **HERE)
    assert [row["scheme"] for row in told.values["rows"]] == ["plan found", "DDP", "TP2"]
    assert "Beside known schemes" in str(told) and "GPU hours" in str(told)


def test_a_plan_is_explained_and_reported(model: str, tmp_path: Path) -> None:
    plan = autopar.plan(model, scheme="megatron", **HERE)
    assert "layers.{0,1}/up" in str(autopar.explain(plan))
    told = autopar.explain(plan, "layers.0/up/MatMul", model=model)
    assert "column-parallel" in str(told) and told.values["operators"]
    assert "Collectives" in str(autopar.explain(plan, model=model, collectives=True))
    page = autopar.report(plan, tmp_path / "page.html", model=model, schemes=["DDP"])
    assert "Beside known schemes" in page.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="stalls= needs model="):
        autopar.explain(plan, stalls=True)


class Mlp(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the squares."""
        return self.down(torch.relu(self.up(x))).square().mean()


def test_memory_has_the_parts_that_can_be_counted_by_hand() -> None:
    module = Mlp()
    inputs = (torch.zeros(32, 64),)
    parameters = sum(p.numel() for p in module.parameters()) * 4 / 1e6
    adam = autopar.estimate_memory(module, inputs, torch.optim.AdamW(module.parameters()))
    assert adam.params_mb == pytest.approx(parameters + 32 * 64 * 4 / 1e6)
    assert adam.gradients_mb == pytest.approx(parameters)
    assert adam.optimizer_mb == pytest.approx(2 * parameters)
    # At least the first product's result is there for the backward pass.
    assert adam.activations_mb >= 32 * 256 * 4 / 1e6
    parts = adam.params_mb + adam.gradients_mb + adam.optimizer_mb + adam.activations_mb
    assert parts == pytest.approx(adam.total_mb) and adam.interval[0] < adam.total
    plain = autopar.estimate_memory(module, inputs, torch.optim.SGD(module.parameters(), lr=0.1))
    assert plain.optimizer_mb == 0 and plain.total < adam.total
    momentum = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    assert autopar.estimate_memory(module, inputs, momentum).optimizer_mb == (
        pytest.approx(parameters)
    )
    answer = autopar.estimate_memory(module, inputs)
    assert answer.optimizer_mb == answer.gradients_mb == 0


def test_memory_fits_a_cluster_or_an_amount() -> None:
    module = Mlp()
    estimate = autopar.estimate_memory(module, (torch.zeros(32, 64),), "adamw")
    assert estimate.fits("dgx-h100") and estimate.fits("80GiB") and not estimate.fits("1KiB")
    with pytest.raises(UsageError, match="unknown class of optimizers 'Adagrad'"):
        autopar.estimate_memory(
            module, (torch.zeros(32, 64),), torch.optim.Adagrad(module.parameters())
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_named() -> None:
    estimate = autopar.estimate_memory(Mlp(), (torch.zeros(32, 64),), "sgd")
    with pytest.raises(UsageError, match="no GPU 0"):
        estimate.fits(device=0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--memory overrules it", "memory= overrules it"),
        ("give --optimizer sgd.", 'give optimizer="sgd".'),
        ("(--reuse keeps what matches)", "(reuse_from= keeps what matches)"),
        ("--dim batch=SIZE --dim length=SIZE", 'dims={"batch": SIZE} dims={"length": SIZE}'),
        ("--discover finds it", "discover=True finds it"),
        ("--stages 1", "stages=1"),
        ("--compare prices two", "--compare prices two"),
    ],
)
def test_options_become_arguments(words: str, told: str) -> None:
    assert in_python(words) == told


def test_errors_name_arguments(model: str) -> None:
    with pytest.raises(NoPlanFits) as error:
        autopar.plan(model, memory="1KiB", **HERE)
    assert "batch=" in str(error.value) and "--" not in str(error.value)
    assert error.value.exit_code == 4 and error.value.minimum > 1024


def test_a_sharding_is_verified_from_a_dict() -> None:
    def parallelize(module: nn.Module, mesh: object) -> nn.Module:
        return module

    case = {
        "module": nn.Linear(4, 4),
        "inputs": (torch.ones(2, 4),),
        "parallelize": parallelize,
        "loss": lambda outputs, x: (outputs * x).mean(),
    }
    assert autopar.verify(case, ranks=2).ok


def test_plans_go_out_and_come_in(model: str, tmp_path: Path) -> None:
    plan = autopar.plan(model, scheme="zero3", **HERE)
    converted = autopar.convert(plan, "deepspeed")
    path = tmp_path / "deepspeed.json"
    path.write_text(converted.text, encoding="utf-8")
    assert autopar.import_plan(path, model, **HERE).model == plan.model
