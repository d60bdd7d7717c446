"""Plans as the configurations of other projects: read by their formats, refused by name, executed
where they are Python.
"""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from convert_models import build, styles_of
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.cli import run
from autopar.errors import UsageError
from autopar.integrations.convert import REACHES, TARGETS, convert
from autopar.integrations.importing.megatron import read_megatron
from autopar.options import values as options
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "data": {"scheme": "data", "zero": 0, "micro_batches": 1},
    "zero1": {"scheme": "zero1", "micro_batches": 2},
    "zero3": {"scheme": "zero3", "micro_batches": 1},
    "megatron": {"scheme": "megatron", "zero": 0, "micro_batches": 1},
    "megatron-sp": {"scheme": "megatron-sp", "zero": 0, "micro_batches": 1},
    "both": {"scheme": "data 2 x megatron 2", "zero": 0, "micro_batches": 1},
    "pipeline": {"scheme": "pipeline-1f1b 2 x data 2", "stages": 2, "micro_batches": 2},
    "sharded stages": {"scheme": "PP2 x FSDP2 ZeRO-1", "stages": 2, "micro_batches": 2},
}
REFUSED: dict[tuple[str, str], str] = {
    ("megatron", "fsdp2"): "splitting weights over gpu=4",
    ("megatron-sp", "fsdp2"): "splitting weights",
    ("both", "fsdp2"): "splitting weights over gpu1=2",
    **{
        (name, target): "2 pipeline stages"
        for name in ("pipeline", "sharded stages")
        for target in ("fsdp2", "dtensor", "transformers", "accelerate")
    },
    ("pipeline", "deepspeed"): "PipelineModule",
    ("sharded stages", "deepspeed"): "PipelineModule",
    **{
        (name, "pipelining"): "a plan without pipeline stages"
        for name in PLANS
        if name not in ("pipeline", "sharded stages")
    },
    ("data", "transformers"): "splits no weights",
    ("both", "accelerate"): "replicas over gpu0=2",
    **{
        ("megatron-sp", target): "sequence parallelism" for target in ("transformers", "accelerate")
    },
    ("megatron-sp", "deepspeed"): "sequence parallelism",
}


def planned(name: str) -> Plan:
    given = {"stages": 1, "recompute": "none", **PLANS[name]}
    return autopar.plan(*build(), devices=4, cluster="dgx-h100", memory="70GiB", **given)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: planned(name) for name in PLANS}


def _python(text: str) -> Any:
    compile(ast.parse(text), "converted.py", "exec")
    return text


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


READ: dict[str, Callable[[str], Any]] = {
    "dtensor": _python,
    "fsdp2": _python,
    "pipelining": _python,
    "deepspeed": json.loads,
    "torchtitan": _python,
    "transformers": _python,
    "megatron-bridge": _python,
    "accelerate": yaml.safe_load,
    "megatron": lambda text: [shlex.split(line) for line in _lines(text)],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_written_or_refused_by_name(
    plans: dict[str, Plan], name: str, target: str
) -> None:
    why = REFUSED.get((name, target))
    if why is not None:
        with pytest.raises(UsageError, match=why):
            convert(plans[name], target)
        return
    converted = convert(plans[name], target)
    assert READ[target](converted.text) and converted.text.endswith("\n")
    assert converted == convert(plans[name], target)


def test_degrees(plans: dict[str, Plan]) -> None:
    parallel = tomllib.loads(convert(plans["both"], "torchtitan", "0.2").text)["parallelism"]
    # Version 0.2 has no replicas beside split weights.
    assert parallel["data_parallel_shard_degree"] == parallel["tensor_parallel_degree"] == 2
    assert parallel["data_parallel_replicate_degree"] == 1
    titan = tomllib.loads(convert(plans["pipeline"], "torchtitan", "0.2.2").text)
    assert (
        titan["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
        and titan["parallelism"]["pipeline_parallel_degree"] == 2
    )
    assert (
        titan["parallelism"]["pipeline_parallel_microbatch_size"] == 2
        and titan["training"]["local_batch_size"] == 4
    )
    megatron = dict(
        line.split() for line in _lines(convert(plans["both"], "megatron").text) if " " in line
    )
    assert megatron["--tensor-model-parallel-size"] == "2" and megatron["--micro-batch-size"] == "4"
    assert "--sequence-parallel" in _lines(convert(plans["megatron-sp"], "megatron").text)
    assert "--use-distributed-optimizer" in _lines(convert(plans["zero1"], "megatron").text)
    speed = json.loads(convert(plans["zero1"], "deepspeed").text)
    assert speed["zero_optimization"]["stage"] == 1 and speed["gradient_accumulation_steps"] == 2
    parts = (speed["train_micro_batch_size_per_gpu"], speed["gradient_accumulation_steps"], 4)
    assert speed["train_batch_size"] == parts[0] * parts[1] * parts[2]


def test_styles_are_those_of_transformers(plans: dict[str, Plan]) -> None:
    styles = styles_of(convert(plans["megatron"], "transformers").text)
    assert (
        styles["layers.*.q"] == "colwise"
        and styles["layers.*.down"] == "rowwise"
        and styles["embed"].startswith("embedding_")
    )
    known = pytest.importorskip("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    assert set(styles.values()) <= set(known)


def test_what_no_target_says_is_told(
    plans: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    out = tmp_path / "fsdp2.py"
    plans["zero1"].save(saved)
    run(["convert", str(saved), "--to", "fsdp2", "-o", str(out)])
    shown = capsys.readouterr()
    assert "2 micro-batches" in shown.err and "2 micro-batches" in out.read_text()
    assert shown.out == ""
    run(["convert", str(saved), "--to", "deepspeed"])
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 1
    with pytest.raises(UsageError, match="the command reads it"):
        run(["convert", str(saved), "--to", "fsdp2", "-o", str(saved)])


MIXED = [
    "layers.1.*/linear=gpu:d0",
    "layers.0.[qkvo]/linear=gpu:d0",
    "layers.0.up/linear=gpu:n",
    "layers.0.down/linear=gpu:k",
    "head/linear=gpu:n",
    "embed/embedding=gpu:v",
]
"""Weights that are split on an axis along which most products split the batch."""


def mixed(pins: list[str], **asked: Any) -> Plan:
    given = {"mesh": (4,), "stages": 1, "zero": 0, "micro_batches": 1, "recompute": "none", **asked}
    return autopar.plan(*build(), devices=4, cluster="dgx-h100", pins=pins, **given)


def test_plans_that_mix_kinds_of_work_are_refused_where_the_target_has_one() -> None:
    result = mixed(MIXED)
    for target in ("fsdp2", "torchtitan", "megatron", "deepspeed"):
        with pytest.raises(
            UsageError,
            match=(
                r"on axis gpu most operators split the batch, but 4 split their weights \(such as "
                r"embed/"
            ),
        ):
            convert(result, target)
    with pytest.raises(
        UsageError,
        match="transformers cannot express this plan: on axis gpu most operators split the batch",
    ):
        convert(result, "transformers")


def test_what_few_operators_do_otherwise_is_told() -> None:
    converted = convert(mixed(["layers.*/linear=gpu:d0", "head/linear=gpu:n"]), "fsdp2")
    assert any(
        "the plan has 1 split their weights (such as head/linear): values stay the same" in note
        for note in converted.lost
    )


def test_devices_that_repeat_are_left_out() -> None:
    converted = convert(mixed(["*/linear=gpu0:d0,gpu1:R"], mesh=(2, 2)), "megatron")
    assert any(
        "gpu1=2 repeat each other's work, so the target goes without them" in note
        for note in converted.lost
    )
    assert "--micro-batch-size 4" in converted.text


WEIGHTS = [
    "layers.*.[qkv]/linear=gpu:n",
    "layers.*.up/linear=gpu:n",
    "layers.*.down/linear=gpu:k",
    "layers.*.o/linear=gpu:k",
]


def test_what_lies_between_styles_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"'norm/layer_norm' splits its values, so that the gradient of parameter "
            r"'norm\.weight' is"
        ),
    ):
        convert(mixed([*WEIGHTS, "norm/layer_norm=gpu:d0", "head/linear=gpu:R"]), "dtensor")


def test_products_that_are_repeated_split_the_batch_as_well() -> None:
    """The target splits layers that the plan repeats on a data axis; its notes say so."""
    pins = ["layers.*/linear=gpu:d0", "head/linear=gpu:R"]
    plan = autopar.plan(
        *build(),
        devices=4,
        cluster="dgx-h100",
        mesh=(4,),
        stages=1,
        zero=0,
        micro_batches=1,
        pins=pins,
    )
    converted = convert(plan, "deepspeed")
    assert any(
        note.startswith("1 products that every device along gpu repeats split the batch")
        for note in converted.lost
    )
    assert json.loads(converted.text)["train_micro_batch_size_per_gpu"] == 2


def test_names_from_files_stay_in_their_places(plans: dict[str, Plan]) -> None:
    """Comments end where lines do, and names in code are literals."""
    evil = 'x"""\nimport os\r\n\u2028os.abort()#\''
    data = json.loads(plans["both"].to_json())
    data["model"]["name"] = evil
    for axis in data["mesh"]:
        axis["name"] = axis["name"] + evil
    text = json.dumps(data).replace("layers.0.up", f"layers.0.{json.dumps(evil)[1:-1]}")
    plan = Plan.model_validate(json.loads(text))
    for target in ("dtensor", "torchtitan", "megatron", "deepspeed", "transformers"):
        converted = convert(plan, target).text
        READ[target](converted)
        assert not [
            line for line in converted.splitlines() if line.startswith(("import os", "os.abort"))
        ]
        if target == "dtensor":
            imported = [
                node for node in ast.walk(ast.parse(converted)) if isinstance(node, ast.Import)
            ]
            assert "os" not in {alias.name for node in imported for alias in node.names}


def test_the_parser_lists_the_targets() -> None:
    assert tuple(TARGETS) == tuple(REACHES) == options.TARGETS
    with pytest.raises(UsageError, match="unknown target 'alpa': valid are"):
        convert(Plan.model_construct(), "alpa")


def _trained(text: str, function: str, data: int, tied: bool = False) -> float:
    """The largest difference of outputs and gradients, on this rank, from those of one device;
    ranks have `data` shares of the batch.
    """
    torch.manual_seed(0)
    module, (tokens,) = build()
    whole, _ = build()
    for net in (module, whole) if tied else ():
        net.head.weight = net.embed.weight
    scope: dict[str, Any] = {}
    exec(text, scope)
    module = scope[function](module, "cpu")
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    mine = tokens.chunk(data)[rank * data // world]
    actual = module(mine)
    wanted = whole(mine)
    worst = float((actual - wanted).abs().max())
    actual.square().mean().backward()
    whole(tokens).square().mean().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for name, parameter in whole.named_parameters():
        gradient = gradients[name]
        full = (
            gradient.full_tensor()
            if isinstance(gradient, torch.distributed.tensor.DTensor)
            else gradient
        )
        worst = max(worst, float((full - parameter.grad).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("name", "target", "function", "data"),
    [
        ("megatron", "dtensor", "parallelize", 1),
        ("megatron-sp", "dtensor", "parallelize", 1),
        ("data", "dtensor", "parallelize", 4),
        ("both", "dtensor", "parallelize", 2),
        ("zero3", "dtensor", "parallelize", 4),
        ("zero3", "fsdp2", "shard", 4),
        ("data", "fsdp2", "shard", 4),
    ],
)
def test_the_python_is_executed(
    plans: dict[str, Plan], name: str, target: str, function: str, data: int
) -> None:
    """Four ranks compute the outputs and gradients of one device."""
    text = convert(plans[name], target).text
    results = run_ranks(_trained, 4, text, function, data)
    assert max(results) < 1e-5


class _Issued(TorchDispatchMode):
    """The number of collectives by their names in torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def _micro_batches(text: str, function: str) -> tuple[float, list[int]]:
    """The largest difference of gradients over two micro-batches, and the numbers of gathers,
    reductions to shards, and sums that they issue.
    """
    module, (tokens,) = build()
    whole, _ = build()
    scope: dict[str, Any] = {}
    exec(text, scope)
    module = scope[function](module, "cpu")
    mine = tokens.chunk(4)[dist.get_rank()]
    with _Issued() as issued:
        for number, part in enumerate(mine.chunk(2)):
            scope["micro_batch"](module, last=number == 1)
            (module(part).square().mean() / 2).backward()
    whole(tokens).square().mean().backward()
    differences = [
        float((p.grad.full_tensor() - other.grad).abs().max())
        for p, other in zip(module.parameters(), whole.parameters(), strict=True)
    ]
    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    return max(differences), [issued.counts[kind] for kind in kinds]


@pytest.mark.parametrize(
    ("scheme", "counts"),
    [
        # The units are two layers, and all else.
        ("zero1", [3, 3, 0]),
        ("zero2", [3, 6, 0]),
        ("HSDP 2x2 ZeRO-1", [3, 3, 3]),
        # The outermost unit is gathered again in each backward pass, too.
        ("HSDP 2x2", [12, 6, 3]),
    ],
)
@pytest.mark.parametrize(("target", "function"), [("fsdp2", "shard"), ("dtensor", "parallelize")])
def test_micro_batches_communicate_as_in_the_plan(
    scheme: str, counts: list[int], target: str, function: str
) -> None:
    given = {"stages": 1, "recompute": "none", "micro_batches": 2, "scheme": scheme}
    plan = autopar.plan(*build(), devices=4, cluster="dgx-h100", memory="70GiB", **given)
    text = convert(plan, target).text
    for difference, issued in run_ranks(_micro_batches, 4, text, function):
        assert difference < 1e-5 and issued == counts


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=(pytest.mark.slow, pytest.mark.ci))])
def test_weights_split_on_an_axis_of_data_are_executed(zero: int) -> None:
    text = convert(mixed(MIXED, zero=zero), "dtensor").text
    assert (
        "BOTH = True" in text and "'layers.0.up': ColwiseParallel(input_layouts=Shard(0))" in text
    )
    assert max(run_ranks(_trained, 4, text, "parallelize", 4)) < 1e-5


@pytest.mark.slow
@pytest.mark.ci
def test_values_that_leave_a_module_in_shares_of_the_batch_are_executed() -> None:
    text = convert(mixed([*WEIGHTS, "layers.0/relu=gpu:d0"]), "dtensor").text
    assert (
        "'layers.0.up': ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))" in text
    )
    assert max(run_ranks(_trained, 4, text, "parallelize", 1)) < 1e-5


def test_a_tied_head_stays_tied() -> None:
    module, (tokens,) = build()
    module.head.weight = module.embed.weight
    given: dict[str, Any] = {
        "stages": 1,
        "zero": 0,
        "micro_batches": 1,
        "recompute": "none",
        "scheme": "megatron",
    }
    text = convert(
        autopar.plan(module, (tokens,), devices=2, cluster="dgx-h100", **given), "dtensor"
    ).text
    assert "'head': ColwiseParallel" in text and "'embed': RowwiseParallel" in text
    assert (
        max(run_ranks(_trained, 2, text, "parallelize", 1, True)) < 1e-4
    )  # the outputs are in the hundreds


@pytest.mark.parametrize(("zero", "name"), [(0, "muon"), (1, "dist_muon")])
def test_muon_is_megatrons_in_the_form_that_shares_states_or_not(zero: int, name: str) -> None:
    given = {"mesh": (4,), "scheme": "zero1" if zero else "data", "optimizer": "muon"}
    plan = autopar.plan(
        *build(), devices=4, cluster="dgx-h100", stages=1, recompute="none", **given
    )
    written = convert(plan, "megatron").text
    assert f"--optimizer {name}\n" in written and "--use-distributed-optimizer" not in written
    read = read_megatron(written)
    assert (read.optimizer, read.zero) == ("muon", zero)
