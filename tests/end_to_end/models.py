"""The models of the end-to-end tests: tiny configurations of known architectures, from transformers
and from ONNX.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from tests.end_to_end.encoder_decoder import DROPPED, EncoderDecoder
from tests.end_to_end.recurrent_models import RECURRENT, recurrent_model

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
SEQUENCE = 16
VOCABULARY = 96
WIDTH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
SEED = 0


def _transformers() -> Any:
    """The package, imported where a model is made: it is heavy."""
    return import_module("transformers")


class Called(nn.Module):
    """A transformers model called with its tensors in order, without a cache, that returns its
    logits (and its loss).
    """

    def __init__(self, model: nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.fixed = fixed

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The logits; (loss, logits) where labels are among the tensors."""
        output = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)
        logits: torch.Tensor = output.logits
        return (output.loss, logits) if "labels" in self.names else logits


def tokens(*shape: int, seed: int = SEED) -> torch.Tensor:
    """Token numbers."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def images(size: int) -> torch.Tensor:
    """A batch of pictures with three channels."""
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(SEED))


def gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2: learned positions, fused projections, tied output."""
    config = _transformers().GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=64,
        vocab_size=VOCABULARY,
        n_positions=32,
        attn_implementation="sdpa",
    )
    return Called(_transformers().GPT2LMHeadModel(config), "input_ids", use_cache=False), (
        tokens(BATCH, SEQUENCE),
    )


def gpt2_labels() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """GPT-2 with its own cross entropy; some labels are left out of it."""
    config = _transformers().GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=64,
        vocab_size=VOCABULARY,
        n_positions=32,
        attn_implementation="sdpa",
    )
    labels = tokens(BATCH, SEQUENCE, seed=1)
    labels[:3, 5:] = -100
    return Called(
        _transformers().GPT2LMHeadModel(config), "input_ids", "labels", use_cache=False
    ), (tokens(BATCH, SEQUENCE), labels)


def bert() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """BERT with a padding mask."""
    config = _transformers().BertConfig(
        **WIDTH, vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="sdpa"
    )
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[::2, 12:] = 0
    types = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    types[:, 8:] = 1
    return Called(
        _transformers().BertForMaskedLM(config), "input_ids", "attention_mask", "token_type_ids"
    ), (tokens(BATCH, SEQUENCE), mask, types)


def llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Llama: grouped queries, RMSNorm, rotary positions, SwiGLU."""
    sizes = WIDTH | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "attention_dropout": DROPPED,
    }
    config = _transformers().LlamaConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="sdpa"
    )
    return Called(_transformers().LlamaForCausalLM(config), "input_ids", use_cache=False), (
        tokens(BATCH, SEQUENCE),
    )


def mixtral() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Mixtral: Llama with four experts, of which two take each token."""
    sizes = WIDTH | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    sizes["attention_dropout"] = DROPPED
    config = _transformers().MixtralConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="sdpa"
    )
    model = _transformers().AutoModelForCausalLM.from_config(
        config, experts_implementation="grouped_mm"
    )
    return Called(model, "input_ids", use_cache=False), (tokens(BATCH, SEQUENCE),)


def _recurrent(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of linear recurrences, whose sequences hold several chunks on each of four ranks."""
    return Called(recurrent_model(name, vocab_size=VOCABULARY), "input_ids", use_cache=False), (
        tokens(2, 32),
    )


def _padding() -> torch.Tensor:
    """A mask of padded sequences."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[::3, 11:] = 0
    return mask


def llama_mask() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The Llama without float32 inside, with padded sequences."""
    called, (ids,) = llama_exact()
    return Called(called.model, "input_ids", "attention_mask", use_cache=False), (ids, _padding())


def mixtral_mask() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The Mixtral with padded sequences."""
    called, (ids,) = mixtral()
    return Called(called.model, "input_ids", "attention_mask", use_cache=False), (ids, _padding())


def llama_exact() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The same Llama with norms that do not go through float32."""
    model, inputs = llama()
    return _with_exact_norms(model), inputs


def mistral_window() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A Llama of which a token sees six, with norms that do not go through float32."""
    sizes = WIDTH | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    config = _transformers().MistralConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=32, sliding_window=6
    )
    called = Called(_transformers().MistralForCausalLM(config), "input_ids", use_cache=False)
    return _with_exact_norms(called), (tokens(BATCH, SEQUENCE),)


def _with_exact_norms(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "MistralRMSNorm"):
                norm = nn.RMSNorm(WIDTH["hidden_size"], eps=1e-6)
                setattr(parent, name, norm)
    return model


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ViT: patches by a convolution, a class token, pictures of 16 patches."""
    dropped = {"hidden_dropout_prob": DROPPED, "attention_probs_dropout_prob": DROPPED}
    config = _transformers().ViTConfig(
        **WIDTH, **dropped, image_size=32, patch_size=8, num_labels=16, attn_implementation="sdpa"
    )
    return Called(_transformers().ViTForImageClassification(config), "pixel_values"), (images(32),)


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet: bottlenecks with batch norms, which in training take the statistics of the batch."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 16}
    return Called(
        _transformers().ResNetForImageClassification(_transformers().ResNetConfig(**sizes)),
        "pixel_values",
    ), (images(32),)


def net(*, batch: int = 1, size: int = 48) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """An encoder and decoder of pictures, as U-Net has them, in which every size is halved and
    doubled exactly.
    """
    layers = [
        nn.Conv2d(3, 8, 7, padding=3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.GroupNorm(3, 12),
        nn.GELU(),
        nn.Conv2d(12, 12, 3, padding=2, dilation=2, groups=3),
        nn.AvgPool2d(3, 1, 1),
        nn.BatchNorm2d(12),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 4, 5, padding="same"),
    ]
    pixels = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(SEED))
    return nn.Sequential(*layers), (pixels,)


def encoder_decoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """An encoder and a decoder, with padded sources."""
    return EncoderDecoder(VOCABULARY, SEQUENCE), (
        tokens(BATCH, SEQUENCE),
        tokens(BATCH, SEQUENCE, seed=1),
        _padding(),
    )


TORCH_MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "gpt2": gpt2,
    "gpt2_labels": gpt2_labels,
    "bert": bert,
    "llama": llama,
    "llama_exact": llama_exact,
    "mistral_window": mistral_window,
    "vit": vit,
    "resnet": resnet,
    "net": net,
    "mixtral": mixtral,
    "llama_mask": llama_mask,
    "mixtral_mask": mixtral_mask,
    "encoder_decoder": encoder_decoder,
    **{name: functools.partial(_recurrent, name) for name in RECURRENT},
}


class _Net:
    """Nodes and initializers of a growing ONNX net."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(SEED)

    def weight(self, name: str, *shape: int, mean: float = 0.0, deviation: float = 0.1) -> str:
        values = mean + deviation * self.random.standard_normal(shape)
        self.initializers.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def op(self, kind: str, name: str, inputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def convolution(
        self,
        name: str,
        x: str,
        channels: tuple[int, int],
        kernel: int,
        stride: int = 1,
        *,
        active: bool = True,
    ) -> str:
        """A convolution, its batch norm (in inference form) and, where `active`, a ReLU."""
        weight = self.weight(f"{name}.weight", channels[1], channels[0], kernel, kernel)
        x = self.op(
            "Conv",
            name,
            [x, weight],
            kernel_shape=[kernel] * 2,
            pads=[kernel // 2] * 4,
            strides=[stride] * 2,
        )
        scale = self.weight(f"{name}.norm.scale", channels[1], mean=1.0)
        bias, mean = (self.weight(f"{name}.norm.{part}", channels[1]) for part in ("bias", "mean"))
        variance = self.weight(f"{name}.norm.variance", channels[1], mean=1.0, deviation=0.05)
        x = self.op(
            "BatchNormalization", f"{name}.norm", [x, scale, bias, mean, variance], epsilon=1e-5
        )
        return self.op("Relu", f"{name}.relu", [x]) if active else x

    def bottleneck(self, name: str, x: str, channels: tuple[int, int], stride: int) -> str:
        """Three convolutions beside a projection, joined by an addition, as in ResNet-50."""
        inner = channels[1] // 4
        y = self.convolution(f"{name}.reduce", x, (channels[0], inner), 1)
        y = self.convolution(f"{name}.middle", y, (inner, inner), 3, stride)
        y = self.convolution(f"{name}.expand", y, (inner, channels[1]), 1, active=False)
        if channels[0] != channels[1] or stride != 1:
            x = self.convolution(f"{name}.project", x, channels, 1, stride, active=False)
        return self.op("Relu", f"{name}.relu", [self.op("Add", f"{name}.add", [x, y])])


def write_residual(path: Path) -> Path:
    """A small residual convolution net like ResNet-50: stem, pooling, three bottlenecks, mean,
    classifier.
    """
    net = _Net()
    x = net.convolution("stem", "pixels", (3, 16), 7, 2)
    x = net.op("MaxPool", "pool", [x], kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
    x = net.bottleneck("block0", x, (16, 32), 1)
    x = net.bottleneck("block1", x, (32, 32), 1)
    x = net.bottleneck("block2", x, (32, 64), 2)
    x = net.op("Flatten", "flatten", [net.op("GlobalAveragePool", "mean", [x])], axis=1)
    net.nodes.append(
        helper.make_node(
            "Gemm",
            [x, net.weight("head.weight", 16, 64), net.weight("head.bias", 16)],
            ["scores"],
            name="head",
            transB=1,
        )
    )
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [BATCH, 3, 32, 32])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [BATCH, 16])
    graph = helper.make_graph(net.nodes, "residual", [pixels], [scores], net.initializers)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def write_resnet50(path: Path) -> Path:
    """ResNet-50 as the onnx package ships it: the fills that stand for its weights become weights
    drawn from a seed.
    """
    light = (
        Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_resnet50.onnx"
    )
    model = onnx.load(light)
    graph = model.graph
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    random = np.random.default_rng(SEED)
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shape = tuple(int(size) for size in shapes[node.input[0]])
            name = node.output[0]
            values = random.standard_normal(shape) * (
                (1.5 / np.prod(shape[1:])) ** 0.5 if len(shape) > 1 else 0.05
            )
            if name.endswith(("_bn_s_0", "_bn_riv_0")):
                values = 1 + np.abs(values)
            graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    del graph.node[:]
    graph.node.extend(kept)
    onnx.save(model, path)
    return path


def write_gpt2(path: Path, **sizes: int) -> Path:
    """GPT-2 as the example writes it, without weights."""
    spec = importlib.util.spec_from_file_location("gpt2_onnx", ROOT / "examples" / "gpt2_onnx.py")
    assert spec is not None and spec.loader is not None
    example = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    written: Path = example.write_gpt2(path, **sizes)
    return written


def load(
    name: str, folder: Path, *, train: bool = True, dtype: str = "float64", dropping: bool = False
) -> LoadedModel:
    """A model of this file as the planner takes it; `folder` receives the ONNX files. `dropping`:
    with its dropout, if it has any.
    """
    options = ModelOptions(train=train, dtype=dtype, batch=BATCH)
    if name == "resnet50_onnx":
        return load_model(write_resnet50(folder / "resnet50.onnx"), replace(options, batch=4))
    if name == "residual_onnx":
        return load_model(write_residual(folder / "residual.onnx"), options)
    if name == "gpt2_onnx":
        path = write_gpt2(
            folder / "gpt2.onnx",
            layers=2,
            hidden=64,
            heads=4,
            vocabulary=VOCABULARY,
            positions=32,
            sequence=SEQUENCE,
        )
        return load_model(path, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module, inputs = TORCH_MODELS[name]()
    return load_model(
        module.train(train and (dropping or name in OWN_STATISTICS)),
        replace(options, batch=len(inputs[0])),
        inputs,
    )


OWN_STATISTICS = frozenset({"resnet", "net"})
"""Models in training mode: they have no dropout, and their batch norms take the statistics of the
batch.
"""
MODELS = ("gpt2", "bert", "llama", "llama_exact", "vit", "residual_onnx", "gpt2_onnx")
"""The models of the tests of random plans."""
FLOAT32_INSIDE = frozenset({"llama", "gpt2_labels", *RECURRENT})
"""Models that compute in float32 on the way, whatever the dtype of their weights."""
