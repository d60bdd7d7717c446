"""A small ResNet that is an ONNX file, trained.

`python examples/train_resnet_onnx.py --ranks 2`, or by torchrun.

The file holds no training: the loss is given beside it, and parameters are what the file stores as
floating-point numbers. What was learnt is written back into the file's own initializers, so that
any ONNX runtime runs it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import autopar
from autopar import Plan

BATCH = 8
SIZE = 8
CHANNELS = 8
CLASSES = 4


class _Writer:
    """The nodes and weights of the network so far."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.random = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        """A weight with random numbers of the scale that keeps variances."""
        values = self.random.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def op(self, kind: str, name: str, *inputs: str, **attributes: object) -> str:
        """A node, and its output."""
        self.nodes.append(
            helper.make_node(kind, list(inputs), [f"{name}.out"], name=name, **attributes)
        )
        return f"{name}.out"

    def conv(self, name: str, x: str, channels: int, into: int) -> str:
        """A convolution of 3 x 3."""
        return self.op(
            "Conv", name, x, self.weight(f"{name}.weight", into, channels, 3, 3), pads=[1, 1, 1, 1]
        )


def write_resnet(path: Path, blocks: int = 2) -> Path:
    """Write a convolution, residual blocks, the mean over the picture, and a product."""
    w = _Writer()
    x = w.op("Relu", "stem.relu", w.conv("stem", "picture", 3, CHANNELS))
    for number in range(blocks):
        name = f"block{number}"
        inner = w.op("Relu", f"{name}.relu0", w.conv(f"{name}.conv0", x, CHANNELS, CHANNELS))
        x = w.op(
            "Relu",
            f"{name}.relu1",
            w.op("Add", f"{name}.add", x, w.conv(f"{name}.conv1", inner, CHANNELS, CHANNELS)),
        )
    flat = w.op("Flatten", "flatten", w.op("GlobalAveragePool", "pool", x))
    w.nodes.append(
        helper.make_node(
            "Gemm",
            [flat, w.weight("head.weight", CLASSES, CHANNELS)],
            ["scores"],
            name="head",
            transB=1,
        )
    )
    picture = helper.make_tensor_value_info("picture", TensorProto.FLOAT, [BATCH, 3, SIZE, SIZE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [BATCH, CLASSES])
    graph = helper.make_graph(w.nodes, "resnet", [picture], [scores], w.weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path
    )
    return path


def pictures(step: int) -> tuple[Tensor, Tensor]:
    """A batch of pictures, brighter in one of four corners, and which."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    corner = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    half = SIZE // 2
    for number, place in enumerate(corner.tolist()):
        x[number, :, place // 2 * half :, place % 2 * half :] += 1.0
    return x, corner


def train(path: Path, plan: Plan, steps: int) -> list[float]:
    """Train on this rank; rank 0 writes what was learnt."""
    model = autopar.parallelize(str(path), plan, outputs="whole")
    optimizer = autopar.local_optimizer(torch.optim.AdamW, model, lr=1e-2)
    losses = []
    for step in range(steps):
        x, corner = pictures(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), corner)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    learnt = model.full_values(model.graph_parameters())
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        write_back(path, {name: value.detach().cpu().numpy() for name, value in learnt.items()})
    return losses


def write_back(path: Path, learnt: dict[str, np.ndarray]) -> None:
    """The file with other weights, beside it as NAME-trained.onnx."""
    model = onnx.load(path)
    for place, tensor in enumerate(model.graph.initializer):
        if tensor.name in learnt:
            model.graph.initializer[place].CopyFrom(
                numpy_helper.from_array(learnt[tensor.name], tensor.name)
            )
    onnx.save(model, path.with_name(f"{path.stem}-trained.onnx"))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("resnet.onnx"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    if os.environ.get("RANK", "0") == "0" and not given.file.exists():
        write_resnet(given.file)
    plan = autopar.plan(
        str(given.file), devices=ranks, cluster="local-cpu", scheme="data", micro_batches=1
    )
    if "RANK" in os.environ:
        losses = train(given.file, plan, given.steps)
    else:
        from autopar.runtime.launch import run_ranks

        losses = run_ranks(train, ranks, given.file, plan, given.steps)[0]
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {given.steps} steps")
    return losses


if __name__ == "__main__":
    main()
