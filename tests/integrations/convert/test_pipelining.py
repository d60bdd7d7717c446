"""Plans with pipeline stages as Python for `torch.distributed.pipelining`: executed on ranks, in
the plan's order, or refused by name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_models import Net
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import autopar
from autopar.errors import PlanError, UsageError
from autopar.integrations.convert import convert
from autopar.order.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.plan_files import operator

TOKENS = torch.randint(0, 128, (16, 32), generator=torch.Generator().manual_seed(1))
LAYERS = 4


def _net() -> Net:
    torch.manual_seed(0)
    return Net(layers=LAYERS)


def _planned(devices: int, **asked: Any) -> Plan:
    """Stages of equal blocks, which split the batch where they have several devices."""
    given = {
        "stages": 2,
        "micro_batches": 4,
        "recompute": "none",
        "zero": 0,
        "mesh": (devices // 2,),
        "offload": "none",
        **asked,
    }
    if devices > 2 and "scheme" not in asked:
        given.setdefault("pins", ["*/linear=gpu:d0"])
    chosen = autopar.plan(
        _net(), (TOKENS,), devices=devices, cluster="dgx-h100", memory="70GiB", **given
    )
    data = json.loads(chosen.to_json())
    for number, stage in enumerate(data["stages"][1:], 1):
        stage["first"] = f"layers.{number * LAYERS // len(data['stages'])}.norm/layer_norm"
    return Plan.model_validate(data)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpipe": (2, {"schedule": "gpipe"}),
    "1f1b": (2, {"schedule": "1f1b"}),
    "interleaved": (2, {"schedule": "interleaved", "interleave": 2}),
    "zero_bubble": (2, {"schedule": "zero_bubble"}),
    "data": (4, {"schedule": "1f1b"}),
    "zero1": (4, {"scheme": "pipeline-gpipe 2 x zero1 2", "zero": None}),
    "zero3": (4, {"scheme": "pipeline-1f1b 2 x zero3 2", "zero": None}),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return _planned(2, schedule="1f1b")


def _trained(text: str, data: int) -> tuple[float, int]:
    """The largest difference of losses and gradients, on this rank, from those of one device; and
    how many gradients it has.
    """
    whole = _net()
    scope = dict[str, Any]()
    wanted = whole(TOKENS).square().mean()
    wanted.backward()
    exec(text, scope)
    rank = torch.distributed.get_rank()
    last = rank // data == scope["STAGES"] - 1
    mine = TOKENS.chunk(data)[rank % data]
    schedule, parts = scope["pipelined"](
        _net(), (mine.chunk(4)[0],), lambda output, target: output.square().mean()
    )
    losses: list[Tensor] = []
    for part in parts:
        part.zero_grad()
    if rank < data:
        schedule.step(mine)
    else:
        schedule.step(target=mine, losses=losses)
    worst = 0.0
    means = torch.stack(losses).mean().detach() if last else torch.zeros(())
    torch.distributed.all_reduce(means)
    worst = abs(float(means / data) - float(wanted))
    by_name = dict(whole.named_parameters())
    seen = 0
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            full = (
                gradient.full_tensor()
                if isinstance(gradient, torch.distributed.tensor.DTensor)
                else gradient
            )
            reference = by_name[name.removeprefix("module.")].grad
            assert reference is not None
            worst = max(worst, float((full - reference).abs().max()))
            seen = seen + 1
    return worst, seen


_SHARED = {
    "data": "REPLICAS, SHARDS = 2, 1, 2, 1",
    "zero1": "REPLICAS, SHARDS = 2, 1, 1, 2",
    "zero3": "RESHARD, SINGLE = True, True",
}
FAST = ("gpipe", "1f1b")
SLOW = (pytest.mark.slow, pytest.mark.ci)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else SLOW) for name in PLANS]
)
def test_ranks_compute_what_one_device_does(name: str) -> None:
    devices, asked = PLANS[name]
    chosen = _planned(devices, **asked)
    text = convert(chosen, "pipelining").text
    assert name not in _SHARED or _SHARED[name] in text
    results = run_ranks(_trained, devices, text, devices // 2)
    assert max(worst for worst, _ in results) < 1e-5
    assert sum(seen for _, seen in results) == len(chosen.parameters) * devices // 2


def test_the_file_is_the_same_each_time_and_names_its_parts(plan: Plan) -> None:
    text = convert(plan, "pipelining").text
    assert text == convert(Plan.model_validate(json.loads(plan.to_json())), "pipelining").text
    values = {
        target.id: node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert ast.literal_eval(values["MICRO_BATCHES"]) == 4 and "Schedule1F1B as Schedule" in text
    assert ast.literal_eval(values["SPLITS"]) == (("layers.2.norm/layer_norm", False),)


LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class _Stage:
    """The attributes that the classes ask of a stage for its order."""

    group_rank = 0
    submod = None

    def __init__(self, number: int, ranks: int, stages: int) -> None:
        self.stage_index = number
        self.num_stages = stages
        self.group_size = ranks


ORDERED = [
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 4, 3),
    ("zero_bubble", 4, 8, 1),
    ("zero_bubble", 2, 4, 1),
]


@pytest.mark.parametrize(("name", "ranks", "count", "chunks"), ORDERED)
def test_the_class_has_the_order_of_the_plan(
    name: str, ranks: int, count: int, chunks: int
) -> None:
    stages = [_Stage(number * ranks, ranks, ranks * chunks) for number in range(chunks)]
    torch_class = SCHEDULES[name].other_names.torch
    assert torch_class is not None
    schedule = getattr(schedules, torch_class.name)(
        stages, count, loss_fn=lambda output, target: output
    )
    for rank in range(ranks):
        actions = [action for action in schedule.pipeline_order[rank] if action is not None]
        word = "".join(LETTERS[action.computation_type.name] for action in actions)
        assert word == SCHEDULES[name].words(rank, ranks, count, chunks)
        forward = [action for action, letter in zip(actions, word, strict=True) if letter == "F"]
        visits = [(action.stage_index // ranks, action.microbatch_index) for action in forward]
        assert visits == list(SCHEDULES[name].visits(ranks, count, chunks))


def _cut_at(first: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["stages"][1]["first"] = first

    return change


def _recomputed(data: dict[str, Any]) -> None:
    data["schedule"]["recompute"] = [["layers.0.up/linear", "layers.0/relu"]]


def _hosted(data: dict[str, Any]) -> None:
    data["parameters"]["head.weight"]["state"] = "host"


def _short(data: dict[str, Any]) -> None:
    data["schedule"]["micro_batches"] = 1


def _twice(data: dict[str, Any]) -> None:
    """Chunks 0 and 2, on the same device, read the embedding's weight."""
    operator(data, "layers.2.norm/layer_norm")["inputs"][1][0] = "embed.weight"
    data["stages"] = [
        {**data["stages"][0], "first": f"layers.{number}.norm/layer_norm"}
        for number in range(LAYERS)
    ]
    data["schedule"] |= {"pipeline": "interleaved", "interleave": 2}


def _chunked(data: dict[str, Any]) -> None:
    data["stages"] = data["stages"] * 2
    data["schedule"]["interleave"] = 2


def _master(data: dict[str, Any]) -> None:
    data["schedule"]["master"] = "float64"


def _reduced(data: dict[str, Any]) -> None:
    data["schedule"]["reduce"] = "bfloat16"


def _inferred(data: dict[str, Any]) -> None:
    data["model"]["mode"] = "infer"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_recomputed, r"recompute \(alternate\)"),
        (_hosted, "optimizer state in host memory"),
        (_short, "1f1b with 1 micro-batches on 2 stages"),
        (_inferred, "inference"),
        (_chunked, "2 chunks on each stage under the schedule 1f1b"),
        (_master, "parameters stored in float64"),
        (_reduced, "gradients in bfloat16"),
        (_twice, "parameter 'embed.weight', which chunks 0, 2 on the same devices read"),
    ],
)
def test_what_it_cannot_express_is_named(
    plan: Plan, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(UsageError, match=f"^pipelining cannot express this plan: .*{why}"):
        convert(Plan.model_validate(data), "pipelining")


CUTS = [
    "layers.2.norm/layer_norm",
    "layers.2.k/linear",
    "layers.2/transpose.1",
    "layers.2/scaled_dot_product_attention",
    "layers.2/relu",
    "head/linear",
]


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=() if "transpose" in first else SLOW) for first in CUTS]
)
def test_stages_cut_anywhere_are_executed(plan: Plan, first: str) -> None:
    """Other values in use travel beside the first: the residual, queries while keys are made."""
    data = json.loads(plan.to_json())
    _cut_at(first)(data)
    text = convert(Plan.model_validate(data), "pipelining").text
    assert f"({first!r}, False)" in text
    results = run_ranks(_trained, 2, text, 1)
    assert max(worst for worst, _ in results) < 1e-5


class Shared(nn.Module):
    """Stages that share: a weight, an input that all read and that the model takes last, a table
    made of no input, a first value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, late: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            table = torch.arange(16, dtype=torch.float32).sin()
        first = x = self.embed(tokens)
        for layer in self.layers:
            gate, up = (layer(x) + table).chunk(2, -1)
            x = torch.cat([gate * late, up], -1).relu_() + first
        output: Tensor = self.head(x)
        return output


def _shared() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    return Shared(), (
        torch.rand(8, 1, 1, generator=chance),
        torch.randint(0, 32, (8, 4), generator=chance),
    )


def _shares(text: str) -> tuple[float, int]:
    """The largest difference of gradients, and how many gradients this rank has."""
    whole, inputs = _shared()
    module, _ = _shared()
    whole(*inputs).square().mean().backward()
    scope = dict[str, Any]()
    exec(text, scope)
    rank = torch.distributed.get_rank()
    stages = scope["STAGES"]
    schedule, parts = scope["pipelined"](
        module, tuple(value[:2] for value in inputs), lambda output, target: output.square().mean()
    )
    given = inputs if rank == 0 else ()
    schedule.step(*given, **({"target": inputs[1]} if rank == stages - 1 else {}))
    by_name = dict(whole.named_parameters(remove_duplicate=False))
    parameters = dict(parts[0].named_parameters())
    return max(
        (
            float((value.grad - by_name[name].grad).abs().max())
            for name, value in parameters.items()
        ),
        default=0.0,
    ), len(parameters)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=SLOW)])
def test_what_stages_share_is_handed_on_or_held_by_each(stages: int) -> None:
    given: dict[str, Any] = {
        "schedule": "gpipe",
        "micro_batches": 4,
        "recompute": "none",
        "zero": 0,
        "mesh": (1,),
        "offload": "none",
    }
    chosen = autopar.plan(
        *_shared(), devices=stages, cluster="dgx-h100", memory="70GiB", stages=stages, **given
    )
    data = json.loads(chosen.to_json())
    firsts = {2: ["chunk.2"], 4: ["mul.1", "layers.2/linear", "relu_.3"]}[stages]
    for stage, first in zip(data["stages"][1:], firsts, strict=True):
        stage["first"] = first
    results = run_ranks(_shares, stages, convert(Plan.model_validate(data), "pipelining").text)
    assert max(worst for worst, _ in results) < 1e-6
    assert sum(count for _, count in results) == 10


def test_names_from_files_stay_in_their_places(plan: Plan) -> None:
    evil = 'x"""\nimport os\r\n\u2028os.abort()#\''
    data = json.loads(plan.to_json().replace("layers.2", f"layers.2{json.dumps(evil)[1:-1]}"))
    data["model"]["name"] = evil
    text = convert(Plan.model_validate(data), "pipelining").text
    assert not [line for line in text.splitlines() if line.startswith(("import os", "os.abort"))]
    assert "os" not in {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }


@pytest.mark.parametrize("first", ["nowhere", "embed/embedding"])
def test_stages_that_begin_nowhere_are_no_plan(plan: Plan, first: str) -> None:
    data = json.loads(plan.to_json())
    _cut_at(first)(data)
    with pytest.raises(PlanError, match="one after the other"):
        convert(Plan.model_validate(data), "pipelining")


def test_plans_without_stages_and_with_split_weights_are_refused() -> None:
    with pytest.raises(UsageError, match=r"without pipeline stages \(fsdp2 and dtensor"):
        convert(_planned(2, stages=1, mesh=(2,), pins=["*/linear=gpu:d0"]), "pipelining")
    pins = [
        "layers.*.up/linear=gpu:n",
        "layers.*.down/linear=gpu:k",
        "layers.*.[qkvo]/linear=gpu:n",
        "head/linear=gpu:n",
    ]
    with pytest.raises(UsageError, match="splitting weights over gpu=2"):
        convert(_planned(4, pins=pins), "pipelining")
    with pytest.raises(UsageError, match="zero_bubble with data parallelism"):
        convert(_planned(4, schedule="zero_bubble"), "pipelining")
