"""Groups of options that several commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..errors import UsageError
from ..order.schedules import SCHEDULES

OPTIMIZERS = ("adamw", "sgd", "momentum", "lamb", "none")
SEARCHES = ("dynamic_programming", "lagrangian", "recursive_programming", "exhaustive", "integer_program")
SCHEMES = (
    "data", "zero1", "zero2", "zero3", "tensor", "megatron", "megatron-sp", "ulysses", "context", "expert", "2d", "2.5d", "3d",
    "pipeline-gpipe", "pipeline-1f1b", "gpt3-64x6x8",
)  # fmt: skip
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer")
FORMATS = ("torchtitan", "megatron", "deepspeed", "hf-tp-plan")
TARGETS = ("dtensor", "hf-tp-plan", "torchtitan", "megatron", "deepspeed", "fsdp2", "pipelining")
DTYPES = ("float32", "float16", "bfloat16", "float64")
MODELS = "file.onnx, file.pt2, package.module:function returning (module, example_inputs), or hf:config.json of Hugging Face"


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def model_options(parser: Parser, *, several: bool = False) -> None:
    """Add the options of the cluster (or `several`), and of reading and running the model."""
    add = parser.add_argument
    cluster = "a preset (autopar cluster list) or a file (default: this machine's GPUs, else dgx-h100)"
    if several:
        add("--devices", metavar="N|1..64", help="number of devices, or several, as 8,16 or 1..64: how the model scales")
        add("--cluster", action="append", default=[], metavar="NAME|FILE", help=f"{cluster}; several are set beside one another")
    else:
        add("--devices", type=int, metavar="N", help="number of devices, any from 1 up (default: all of the cluster)")
        add("--cluster", metavar="NAME|FILE", help=cluster)
    add("--mode", choices=("train", "infer"), default="train", help="plan a training step or an inference (default: train)")
    add("--batch", type=int, metavar="N", help="the global batch")
    add("--seq", type=int, metavar="N", help="tokens of a sequence of an hf: model (default: as many as its positions allow)")
    add("--dim", action="append", default=[], metavar="NAME=SIZE", help="size of a named dim of an ONNX model; repeatable")
    add("--shape", action="append", default=[], metavar="INPUT=1x30", help="shape of an input of an ONNX model; repeatable")
    add("--dtype", choices=DTYPES, help="floating-point type of the computation: weights and activations (default: the model's)")
    master = "floating-point type in which parameters are stored and updated (default: float32 beside a 16-bit --dtype, else as computed)"
    add("--master", choices=DTYPES, help=master)
    add("--reduce", choices=DTYPES, help="floating-point type in which gradients are added up and travel (default: that of --master)")
    trust_option(parser)
    add("--frozen", action="append", default=[], metavar="NAME", help="stored floats of an ONNX model that are constants; repeatable")
    add("--trained", action="append", default=[], metavar="NAME", help="stored floats that are parameters all the same; repeatable")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of the training step (default: adamw)")
    add(
        "--memory", metavar="80GiB", help="memory limit per device, in bytes or with a unit: MB, MiB, GB, GiB, ... (default: the cluster's)"
    )
    add(
        "--loss",
        metavar="MODULE:FUNCTION",
        help="loss(outputs, *inputs) of a PyTorch model (default: its scalar output, else mean squares)",
    )


def pin_options(parser: Parser) -> None:
    """Add the options that pin parts of a plan."""
    add = parser.add_argument
    add("--mesh", metavar="2x4", help="plan on this mesh (of a stage) only, outermost axis first (default: the best mesh)")
    schemes = (
        f"restrict the plan to a known scheme ({', '.join(SCHEMES)}; also PxDxT: pipeline, data, tensor), or each axis of --mesh to one"
    )
    add("--scheme", metavar="NAME|AXIS:NAME,...", help=schemes)
    add("--stages", type=int, metavar="N", help="number of pipeline stages (default: searched; 1 is no pipeline)")
    add("--micro-batches", type=int, metavar="N", help="parts of the global batch that run one after the other (default: searched)")
    add("--recompute", choices=RECOMPUTES, help="what is made again in the backward pass (default: searched)")
    zero = "parameters: 0 stored whole, 1 split, 2 with gradients split at every micro-batch, 3 gathered for every pass (default: searched)"
    add("--zero", type=int, choices=(0, 1, 2, 3), help=zero)
    offload = "optimizer state that is in the memory of a device's host: none, or that of every parameter (default: searched)"
    add("--offload", choices=OFFLOADS, help=offload)
    add("--schedule", choices=tuple(SCHEDULES), help="order in which pipeline stages run micro-batches (default: searched)")
    add("--interleave", type=int, metavar="N", help="chunks of the model that each stage holds (default: searched)")
    add("--pin", action="append", default=[], metavar="OP=AXIS:FACTOR,...", help="fix an operator (or a pattern) on mesh axes; repeatable")


def trust_option(parser: Parser) -> None:
    text = "read MODEL even where that executes code that the file holds (a .pt2 with pickled parts): only from a maker that you trust"
    parser.add_argument("--trust", action="store_true", help=text)


def trace_option(parser: Parser, where: str = "") -> None:
    text = where + "write the predicted timeline of a step to FILE, for chrome://tracing or Perfetto"
    parser.add_argument("--trace", metavar="FILE", help=text)


def rules_option(parser: Parser) -> None:
    text = "import this module first, for the rules that it registers (autopar.register_rule); repeatable"
    parser.add_argument("--rules", action="append", default=[], metavar="MODULE", help=text)


def pair_of(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text!r} is not of the form {form}")
    return name, value


def size_of(text: str, option: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{option}: {text!r} is no size; give a whole number")
    return int(text)


def sizes_of(text: str, option: str) -> tuple[int, ...]:
    """The sizes in a text such as 2x4."""
    return tuple(size_of(part, option) for part in text.split("x")) if text else ()
