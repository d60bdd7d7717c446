"""Weights out of safetensors files: every rank reads its own slices, and what does not fit is
listed.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, ModelError, RunError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import Imported
from autopar.plan import Plan
from autopar.runtime.files import module_weights as weights
from autopar.runtime.files.module_weights import fill_module, values_from_files
from autopar.runtime.files.weight_files import INDEX, read_headers
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.cuts import Cut, shard_of
from autopar.runtime.run import run_plan

WIDTH = 16
ROWS = 24
BATCH = 8


class Model(nn.Module):
    """Tied weights, a buffer that is saved and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("positions", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(
            self.down(torch.tanh(self.mix(self.embed(tokens) + self.positions))) * self.scale
        )
        return output


def build() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
    model.scale.fill_(0.75)
    return model


def on_meta() -> Model:
    with autopar.parameters_on_meta():
        return Model()


def run_model() -> tuple[nn.Module, tuple[Tensor]]:
    """For the command line."""
    return on_meta(), (TOKENS,)


TOKENS = torch.randint(0, ROWS, (BATCH, 4), generator=torch.Generator().manual_seed(1))


def write(folder: Path, state: Mapping[str, Tensor], files: int = 2) -> Path:
    """A folder as transformers writes it: several files, an index, of tied tensors one."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    where = {
        name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors"
        for number, name in enumerate(names)
    }
    for file in sorted(set(where.values())):
        save_file(
            {name: state[name].contiguous().clone() for name in names if where[name] == file},
            folder / file,
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8")
    return folder


def saved(model: nn.Module, *without: str) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in model.state_dict().items()
        if name not in ("head.weight", *without)
    }


CUTS: list[tuple[tuple[int, ...], list[Cut]]] = [
    ((), []),
    ((5,), []),
    ((12, 8), [Cut(0, 1, 2, 1)]),
    ((12, 8), [Cut(0, 3, 2, 1)]),
    ((12, 8), [Cut(1, 2, 2, 0), Cut(0, 3, 2, 1)]),
    ((12, 8), [Cut(0, 1, 2, 1), Cut(0, 3, 2, 0)]),
    ((4, 6, 8), [Cut(2, 1, 4, 3), Cut(1, 3, 2, 1)]),
]


@pytest.mark.parametrize("number", range(len(CUTS)))
def test_shards(number: int, tmp_path: Path) -> None:
    """The value read is the shard, in memory of its own, cast where another type is wanted."""
    shape, cuts = CUTS[number]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"x": whole}, tmp_path / "x.safetensors")
    actual = read_headers(tmp_path / "x.safetensors")["x"]
    assert torch.equal(actual.shard(cuts), shard_of(whole, cuts)) and torch.equal(actual(), whole)
    assert actual.shard(cuts).untyped_storage().nbytes() == shard_of(whole, cuts).numel() * 4


def _plan(scheme: str, devices: int, dtype: str | None = None) -> Plan:
    return autopar.plan(
        on_meta(), (TOKENS,), devices=devices, cluster="local-cpu", scheme=scheme, dtype=dtype
    )


def _loaded(plan: Plan, folder: Path) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    """The whole state, the outputs, and how many elements of each tensor were read."""
    read: dict[str, int] = {}
    opened = safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def get_tensor(self, name: str) -> Tensor:
            read[name] = read.get(name, 0) + 1
            output: Tensor = self.file.get_tensor(name)
            return output

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Slice:
                def __getitem__(self, index: Any) -> Tensor:
                    output: Tensor = part[index]
                    read[name] = read.get(name, 0) + output.numel()
                    return output

            return Slice()

    safetensors.safe_open = Watched  # type: ignore[misc]
    try:
        module = autopar.parallelize(on_meta(), plan, (TOKENS,), weights=folder)
    finally:
        safetensors.safe_open = opened  # type: ignore[misc]
    state = {
        n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in module.state_dict().items()
    }
    return {name: value.detach() for name, value in state.items()}, module(TOKENS).detach(), read


@pytest.mark.parametrize("scheme", ["data", "megatron", "zero3"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_on_meta(scheme: str, devices: int, tmp_path: Path) -> None:
    model = build()
    folder = write(tmp_path / "weights", saved(model))
    plan = _plan(scheme if devices > 1 else "data", devices)
    for state, outputs, read in run_ranks(_loaded, devices, plan, folder):
        torch.testing.assert_close(outputs, model(TOKENS).detach())
        assert set(state) == set(model.state_dict())
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        split = sum(read[name] for name in ("embed.weight", "mix.weight", "down.weight"))
        total = sum(
            model.state_dict()[name].numel()
            for name in ("embed.weight", "mix.weight", "down.weight")
        )
        if devices == 1 or scheme == "data":
            assert split == total
        elif scheme == "zero3":
            assert split == total // 2
        assert (
            scheme != "megatron"
            or devices == 1
            or read["mix.weight"] == model.mix.weight.numel() // 2
        )


def test_another_type(tmp_path: Path) -> None:
    """Files in float32, a plan in bfloat16 with float32 masters: buffers are cast while they are
    read, parameters stay exact.
    """
    model = build()
    file = tmp_path / "model.safetensors"
    save_file(saved(model), file)
    plan = _plan("zero3", 2, dtype="bfloat16")
    for state, _, _ in run_ranks(_loaded, 2, plan, file):
        cast = {
            name: value.bfloat16() if name == "scale" else value
            for name, value in model.state_dict().items()
        }
        assert all(
            torch.equal(value, cast[name]) and value.dtype == cast[name].dtype
            for name, value in state.items()
        )


def _wrong(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        **{n: v for n, v in state.items() if n != "down.weight"},
        "mix.weight": torch.zeros(3),
        "extra": torch.zeros(2),
    }


REFUSED: dict[str, tuple[Callable[[Path], Path], type[AutoparError], str]] = {
    "names and shapes": (
        lambda folder: write(folder, _wrong(saved(build()))),
        ModelError,
        r"missing: down.weight; unexpected: extra; of another shape: mix.weight \[3\] for \[32, "
        r"16\]",
    ),
    "another kind": (
        lambda folder: write(folder, {**saved(build()), "scale": torch.tensor(1)}),
        ModelError,
        "another kind: scale I64 for torch.float32",
    ),
    "no folder": (lambda folder: folder / "none", ModelError, "does not exist"),
    "another file": (
        lambda folder: _text(folder / "a.bin", ""),
        ModelError,
        "is no .safetensors file",
    ),
    "an empty folder": (
        lambda folder: _text(folder / "a.bin", "").parent,
        ModelError,
        "holds neither",
    ),
    "no header": (
        lambda folder: _text(folder / "a.safetensors", "abc"),
        ModelError,
        "cannot be read as a safetensors file",
    ),
    "a long header": (
        lambda folder: _text(folder / "a.safetensors", "x" * 64),
        ModelError,
        "a header of",
    ),
    "no index": (
        lambda folder: _text(folder / INDEX, "[1]").parent,
        ModelError,
        "is no index of weights",
    ),
    "a file outside": (
        lambda folder: _text(folder / INDEX, '{"weight_map": {"a": "../a.safetensors"}}').parent,
        ModelError,
        "in its own folder",
    ),
    "a lost file": (
        lambda folder: _text(folder / INDEX, '{"weight_map": {"a": "a.safetensors"}}').parent,
        ModelError,
        "cannot be read",
    ),
}


def _text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("count", "end"), [(1, "n0"), (20, "n19"), (21, "n19 and 1 more")])
def test_long_lists_end(count: int, end: str) -> None:
    listed = weights.listed_names([f"n{i}" for i in range(count)]).split(", ")
    assert len(listed) == min(count, weights.SHOWN) and listed[-1] == end


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    make, kind, reason = REFUSED[name]
    with pytest.raises(kind, match=reason):
        values_from_files(
            load_model(on_meta(), ModelOptions(), (TOKENS,)), make(tmp_path / "weights")
        )


def _refused_on(plan: Plan, folders: list[Path]) -> str:
    with pytest.raises(AutoparError) as caught:
        autopar.parallelize(
            on_meta(), plan, (TOKENS,), weights=folders[torch.distributed.get_rank()]
        )
    return str(caught.value)


def test_ranks_refuse_alike(tmp_path: Path) -> None:
    """Wrong files on one rank, and files that are right but not the same, found out by their
    headers alone.
    """
    plan = _plan("zero3", 2)
    right = write(tmp_path / "right", saved(build()))
    other = write(tmp_path / "other", saved(build()), files=3)
    wrong = write(tmp_path / "wrong", saved(build(), "mix.bias"))
    both = run_ranks(_refused_on, 2, plan, [right, wrong])
    assert both[0] == both[1] and "missing: mix.bias" in both[0]
    both = run_ranks(_refused_on, 2, plan, [right, other])
    assert both[0] == both[1] and "the weights of rank 1" in both[0]


def test_a_model_within_a_model(tmp_path: Path) -> None:
    """Names with or without a prefix that all of them share."""

    class Outer(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            output: Tensor = self.model(tokens)
            return output

    inner = write(tmp_path / "inner", saved(build()))
    outer = tmp_path / "outer"
    write(outer, {f"net.{name}": value for name, value in saved(build()).items()})
    for module, folder, name in (
        (Outer(on_meta()), inner, "model.mix.bias"),
        (on_meta(), outer, "mix.bias"),
    ):
        actual = values_from_files(load_model(module, ModelOptions(), (TOKENS,)), folder)[name]
        assert callable(actual) and torch.equal(actual(), build().mix.bias)
    with pytest.raises(ModelError, match="missing"):
        values_from_files(
            load_model(nn.ModuleDict({"a": on_meta()})["a"], ModelOptions(), (TOKENS,)),
            write(outer, {"net.mix.bias": TOKENS}),
        )


def test_computed_buffers(tmp_path: Path) -> None:
    """Buffers of a module that was made on meta altogether are lost, unless the model can compute
    them again.
    """
    folder = write(tmp_path / "weights", saved(build()))

    class Again(Model):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Model):
                module.positions.copy_(torch.arange(WIDTH) / WIDTH)

    plan = _plan("data", 1)
    with torch.device("meta"):
        lost = Model()
        again = Again()
    with pytest.raises(ModelError, match=r"no file holds positions(.|\n)*parameters_on_meta"):
        autopar.parallelize(lost, plan, (TOKENS,), weights=folder)
    torch.testing.assert_close(
        autopar.parallelize(again, plan, (TOKENS,), weights=folder)(TOKENS), build()(TOKENS)
    )
    with pytest.raises(ModelError, match="weights=FOLDER"):
        autopar.parallelize(again, plan, (TOKENS,))


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model = on_meta()
    folder = write(tmp_path / "weights", saved(build()))
    fill_module(model, values_from_files(load_model(model, ModelOptions(), (TOKENS,)), folder))
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model(TOKENS), build()(TOKENS))


def test_run(tmp_path: Path) -> None:
    """A run of a module without weights, checked against one device that reads all of them."""
    folder = write(tmp_path / "weights", saved(build()))
    plan = _plan("megatron", 2)
    report = run_plan(
        load_model(on_meta(), ModelOptions(), (TOKENS,)), plan, steps=2, check=True, weights=folder
    )
    assert report.check.startswith("equal to one device"), report.check
    half = load_model(on_meta(), ModelOptions(dtype="bfloat16"), (TOKENS,))
    report = run_plan(
        half, _plan("zero3", 2, dtype="bfloat16"), steps=2, check=True, weights=folder
    )
    assert report.check.startswith("equal to one device"), report.check
    with pytest.raises(UsageError, match="ONNX"):
        model = load_model(on_meta(), ModelOptions(), (TOKENS,))
        values_from_files(replace(model, imported=Imported), folder)
    with pytest.raises(RunError, match="at least 1 step"):
        run_plan(load_model(on_meta(), ModelOptions(), (TOKENS,)), plan, steps=0, weights=folder)


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    from autopar.cli import run

    folder = write(tmp_path / "weights", saved(build()))
    file = str(tmp_path / "plan.json")
    model = f"{__name__}:run_model"
    run(
        [
            "plan",
            model,
            "--devices",
            "2",
            "--cluster",
            "local-cpu",
            "--scheme",
            "zero3",
            "-o",
            file,
            "--quiet",
        ]
    )
    assert run(["run", file, "--model", model, "--weights", str(folder), "--steps", "2"]) == 0


def _llama(**sizes: Any) -> Any:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**sizes)
    with torch.device("meta"):
        return transformers, config, transformers.LlamaForCausalLM(config)


def _llama_outputs(plan: Plan, folder: Path, call: dict[str, Any], sizes: dict[str, int]) -> Tensor:
    _, _, model = _llama(**sizes)
    logits: Tensor = autopar.parallelize(model, plan, call, weights=folder)(**call).logits.detach()
    return logits


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """Several files and an index, as `save_pretrained` writes them; the model computes its rotary
    frequencies anew.
    """
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes["num_key_value_heads"] = 2
    transformers, config, model = _llama(**sizes)
    torch.manual_seed(0)
    real = transformers.LlamaForCausalLM(config)
    real.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    call = {"input_ids": torch.arange(32).view(4, 8), "use_cache": False}
    plan = autopar.plan(model, call, devices=2, cluster="local-cpu", scheme="megatron")
    for logits in run_ranks(_llama_outputs, 2, plan, tmp_path, call, sizes):
        torch.testing.assert_close(logits, real(**call).logits.detach())


@pytest.mark.slow
def test_a_plan_of_a_large_model() -> None:
    """Eight billion parameters are planned without any of them."""
    _, _, model = _llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )
    call = {"input_ids": torch.zeros(8, 4096, dtype=torch.int64), "use_cache": False}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = autopar.plan(model, call, devices=8, cluster="dgx-h100", stages=1)
    assert sum(math.prod(spec.shape) for spec in plan.parameters.values()) > 8e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024**2  # KiB
