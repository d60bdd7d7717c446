"""The seven kinds of input: a seed of each in a folder, and the commands that read it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.cli import run
from autopar.integrations.convert import TARGETS

SAVED = "saved/step-00000001"
QUICK = ["--cluster", "dgx-h100", "--devices", "2", "--quiet", "--no-compare"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
TOML = """[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 32
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 2
fsdp_reshard_after_forward = "always"
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "none"
[optimizer]
name = "AdamW"
"""
SHELL = (
    "--tensor-model-parallel-size 2\n--micro-batch-size 1\n--global-batch-size 4\n--seq-length "
    "32\n--bf16\n--recompute-activations\n"
)
SPEED = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
}
STYLES = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of input.

    `files`: the files of the seed that are mutated. `commands(folder, file, chance)`: a command
    line that reads them.
    """

    files: tuple[str, ...]
    read: Callable[[Path, str, random.Random], object]


def seeds(folder: Path) -> None:
    """Write the seeds, by the project's own means."""
    import torch
    from torch import nn

    import autopar
    from autopar.runtime.training.saving import finish_saving

    folder.mkdir(parents=True, exist_ok=True)
    _onnx(folder / "model.onnx")
    run(["plan", str(folder / "model.onnx"), *QUICK, "-o", str(folder / "plan.json")])
    staged = [
        "--stages",
        "2",
        "--micro-batches",
        "2",
        "--cluster",
        "dgx-h100",
        "--devices",
        "4",
        "--quiet",
        "--no-compare",
    ]
    run(["plan", str(folder / "model.onnx"), *staged, "-o", str(folder / "staged.json")])
    presets = Path(autopar.__file__).parent / "costmodel" / "presets"
    shutil.copy(presets / "dgx-h100.json", folder / "cluster.json")
    texts = {
        "config.json": json.dumps(LLAMA),
        "titan.toml": TOML,
        "arguments.sh": SHELL,
        "speed.json": json.dumps(SPEED),
    }
    texts |= {
        "styles.json": json.dumps(STYLES),
        "trace.json": json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": 5}]}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.export.save(torch.export.export(module, (torch.ones(4, 8),)), str(folder / "model.pt2"))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    autopar.save(module, optimizer, folder / "saved", step=1)
    finish_saving()
    # Who forges a manifest leaves out its digests, which would tell every mutant from the start.
    manifest = folder / SAVED / "checkpoint.json"
    data = json.loads(manifest.read_text(encoding="utf-8"))
    del data["digest"]
    manifest.write_text(json.dumps(data), encoding="utf-8")
    (manifest.parents[1] / "latest").write_text(manifest.parent.name, encoding="utf-8")
    autopar.export_weights(module, folder / "weights", limit=200)


def _onnx(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    weights = [
        helper.make_tensor(f"layers.{i}.weight", TensorProto.FLOAT, (8, 8), [0.1] * 64)
        for i in range(4)
    ]
    nodes = []
    x = "x"
    for i in range(4):
        nodes.append(
            helper.make_node(
                "MatMul", [x, f"layers.{i}.weight"], [f"y{i}"], name=f"/layers.{i}/MatMul"
            )
        )
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"z{i}"], name=f"/layers.{i}/Relu"))
        x = f"z{i}"
    weights.append(helper.make_tensor("shape", TensorProto.INT64, (2,), [-1, 8]))
    nodes.append(helper.make_node("Reshape", [x, "shape"], ["r"], name="/Reshape"))
    nodes.append(helper.make_node("Softmax", ["r"], ["out"], name="/Softmax", axis=-1))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])]
    made = [helper.make_tensor_value_info("out", TensorProto.FLOAT, [8, 8])]
    graph = helper.make_graph(nodes, "tiny", given, made, weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8),
        str(path),
    )


def _plan(folder: Path, name: str, chance: random.Random) -> object:
    return run(["plan", str(folder / name), *QUICK])


def _explain(folder: Path, name: str, chance: random.Random) -> object:
    path = str(folder / name)
    model = ["--model", str(folder / "model.onnx")]
    out = ["-o", str(folder / "out")]
    commands = [
        ["explain", path],
        ["explain", path, "*MatMul*"],
        ["explain", path, "--json"],
        ["explain", path, *model],
        ["report", path, *out],
        ["report", path, path, *out, *model, "--no-compare"],
        ["convert", path, "--to", chance.choice(tuple(TARGETS)), *out],
        ["plan", str(folder / "model.onnx"), *QUICK, "--reuse", path],
        ["plan", str(folder / "model.onnx"), "--strategy-load", path, "--quiet"],
    ]
    return run(chance.choice(commands))


def _cluster(folder: Path, name: str, chance: random.Random) -> object:
    path = str(folder / name)
    devices = ["--devices", "2", "--quiet", "--no-compare"]
    return run(
        chance.choice(
            (
                ["cluster", "show", path],
                ["plan", str(folder / "model.onnx"), "--cluster", path, *devices],
            )
        )
    )


def _config(folder: Path, name: str, chance: random.Random) -> object:
    model = f"hf:{folder / 'config.json'}"
    if name == "config.json":
        return run(["plan", model, *QUICK, "--batch", "2"])
    if name == "trace.json":
        return run(
            [
                "report",
                str(folder / "staged.json"),
                "--measured",
                str(folder / name),
                "-o",
                str(folder / "out"),
            ]
        )
    sized = [
        "--devices",
        "2",
        "--batch",
        "4",
        "--seq",
        "32",
        "--cluster",
        "dgx-h100",
        "--no-compare",
    ]
    return run(["import", str(folder / name), "--model", model, *sized])


def _weights(folder: Path, name: str, chance: random.Random) -> object:
    from autopar.runtime.files.weight_files import read_headers

    return [tensor() for tensor in read_headers(folder / "weights").values()]


def _saved(folder: Path, name: str, chance: random.Random) -> object:
    if chance.random() < 0.5:
        return run(["checkpoint", "show", str(folder / "saved")])
    import torch
    from torch import nn

    import autopar

    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return autopar.resume(module, torch.optim.AdamW(module.parameters()), folder / "saved")


KINDS: Mapping[str, Kind] = {
    "onnx": Kind(files=("model.onnx",), read=_plan),
    "pt2": Kind(files=("model.pt2",), read=_plan),
    "plan": Kind(files=("plan.json", "staged.json"), read=_explain),
    "cluster": Kind(files=("cluster.json",), read=_cluster),
    "config": Kind(
        files=(
            "config.json",
            "titan.toml",
            "arguments.sh",
            "speed.json",
            "styles.json",
            "trace.json",
        ),
        read=_config,
    ),
    "safetensors": Kind(
        files=tuple(
            f"weights/model{part}"
            for part in (
                ".safetensors.index.json",
                *(f"-0000{i}-of-00002.safetensors" for i in (1, 2)),
            )
        ),
        read=_weights,
    ),
    "checkpoint": Kind(
        files=(f"{SAVED}/checkpoint.json", f"{SAVED}/rank-00000.safetensors", "saved/latest"),
        read=_saved,
    ),
}
