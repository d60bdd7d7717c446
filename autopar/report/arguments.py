"""The commands and options of the command line, and how the texts of their values are read."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .. import __version__
from ..errors import UsageError
from ..order.schedules import SCHEDULES
from .examples import examples
from .training_arguments import convert_options, doctor_options, show_options, train_options

OPTIMIZERS = ("adamw", "sgd", "momentum", "lamb", "none")
SEARCHES = ("dynamic_programming", "lagrangian", "recursive_programming", "exhaustive", "integer_program")
SCHEMES = (
    "data", "zero1", "zero2", "zero3", "tensor", "megatron", "megatron-sp", "ulysses", "context", "expert", "2d", "2.5d", "3d",
    "pipeline-gpipe", "pipeline-1f1b", "gpt3-64x6x8",
)  # fmt: skip
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "optimizer")
TARGETS = ("dtensor", "hf-tp-plan", "torchtitan", "megatron", "deepspeed", "fsdp2")
DTYPES = ("float32", "float16", "bfloat16", "float64")


class Parser(argparse.ArgumentParser):
    """Raises a `UsageError` where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


MODELS = "file.onnx, file.pt2, package.module:function returning (module, example_inputs), or hf:config.json of Hugging Face"


def build_parser() -> Parser:
    """The commands and their options."""
    description = "Finds the cheapest way to split a neural network over many devices, and runs it."
    parser = Parser(prog="autopar", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    _plan_options(_command(commands, "plan", "find the cheapest plan for a model on a cluster"))
    _run_options(_command(commands, "run", "run a plan on ranks of this machine"))
    train_options(_command(commands, "train", "train a model as a file says, resuming by itself"))
    _compare_options(_command(commands, "compare", "price the known schemes beside the plan found"))
    _explain_options(_command(commands, "explain", "tell how the operators of a plan are sharded, and why"))
    _report_options(_command(commands, "report", "write a plan, or two beside one another, as a page for the browser"))
    _convert_options(_command(commands, "convert", "write a plan as the configuration of another project"))
    _discover_options(_command(commands, "discover", "find an operator's sharding rule by executing it, and prove it"))
    _calibrate_options(_command(commands, "calibrate", "measure the ranks at hand and write a cluster file"))
    doctor_options(_command(commands, "doctor", "check this machine: versions, devices, links, plans beside one device, bandwidths"))
    bench = _command(commands, "bench", "measurements beside the model's predictions")
    benches = bench.add_subparsers(dest="bench_command", metavar="collectives", required=True, parser_class=Parser)
    _bench_options(_command(benches, "bench collectives", "measure collectives by size, and compare with the model"))
    checkpoint = _command(commands, "checkpoint", "the checkpoints of a training")
    kinds = checkpoint.add_subparsers(dest="checkpoint_command", metavar="show|convert", required=True, parser_class=Parser)
    show_options(_command(kinds, "checkpoint show", "show a checkpoint's step, plan, fingerprints and sizes"))
    text = "write a checkpoint as Hugging Face has weights, or such weights as a checkpoint"
    convert_options(_command(kinds, "checkpoint convert", text), DTYPES)
    cluster = _command(commands, "cluster", "the clusters that autopar knows")
    kinds = cluster.add_subparsers(dest="cluster_command", metavar="list|show", required=True, parser_class=Parser)
    _json_option(_command(kinds, "cluster list", "list the presets"))
    show = _command(kinds, "cluster show", "show a preset or a cluster file")
    show.add_argument("name", metavar="NAME", help="a preset or a .json, .yaml file")
    show.add_argument("--devices", type=int, metavar="N", help="size it to N devices")
    _json_option(show)
    return parser


def _command(commands: Any, name: str, text: str) -> Parser:
    """A parser of the last of the words in `name`, which `commands` holds."""
    description = text[0].upper() + text[1:] + "."
    made: Parser = commands.add_parser(
        name.split()[-1], help=text, description=description, epilog=examples(name), formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    made.set_defaults(parser=made)
    return made


def _json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def _plan_options(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODELS)
    add("-o", "--output", "--strategy-save", metavar="FILE", help="write the plan (the strategy checkpoint) to FILE")
    _model_options(parser)
    add("--search", choices=SEARCHES, default="dynamic_programming", help="search method (default: dynamic_programming, exact)")
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
    add("--strategy-load", metavar="FILE", help="use this plan as it is; it must match the model")
    add("--reuse", metavar="FILE", help="keep the strategies of this plan that match the model, and search the rest")
    _rules_option(parser)
    add("--discover", action="store_true", help="find the rules of unknown operators by executing them on small shards (needs PyTorch)")
    add("--replicate-unknown", action="store_true", help="have every device compute all of the operators that have no rule")
    _trace_option(parser)
    add("--no-compare", dest="compare", action="store_false", help="do not price the known schemes beside the plan")
    add("--quiet", action="store_true", help="print nothing but errors")
    _json_option(parser)


def _model_options(parser: Parser) -> None:
    """The cluster, and how the model is read and run."""
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="number of devices, any from 1 up (default: all of the cluster)")
    add("--cluster", metavar="NAME|FILE", help="a preset (autopar cluster list) or a file (default: this machine's GPUs, else dgx-h100)")
    add("--mode", choices=("train", "infer"), default="train", help="plan a training step or an inference (default: train)")
    add("--batch", type=int, metavar="N", help="the global batch")
    add("--seq", type=int, metavar="N", help="tokens of a sequence of an hf: model (default: as many as its positions allow)")
    add("--dim", action="append", default=[], metavar="NAME=SIZE", help="size of a named dim of an ONNX model; repeatable")
    add("--shape", action="append", default=[], metavar="INPUT=1x30", help="shape of an input of an ONNX model; repeatable")
    add("--dtype", choices=DTYPES, help="floating-point type of the computation: weights and activations (default: the model's)")
    master = "floating-point type in which parameters are stored and updated (default: float32 beside a 16-bit --dtype, else as computed)"
    add("--master", choices=DTYPES, help=master)
    add("--reduce", choices=DTYPES, help="floating-point type in which gradients are added up and travel (default: that of --master)")
    _trust_option(parser)
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


def _compare_options(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODELS)
    _model_options(parser)
    add("--scheme", action="append", default=[], metavar="NAME", help="a scheme to price, as of `plan --scheme`; repeatable (default: all)")
    _rules_option(parser)
    _json_option(parser)


def _run_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("--model", required=True, metavar="MODEL", help="the model that it was made for")
    _trust_option(parser)
    add("--nproc", type=int, metavar="N", help="number of ranks (default, and only choice: the plan's devices)")
    add("--loss", metavar="MODULE:FUNCTION", help="the loss that was given to plan")
    add("--steps", type=int, default=1, metavar="K", help="training steps to run (default: 1)")
    add("--check", action="store_true", help="compare outputs, gradients and updated weights with one device")
    add("--profile", metavar="FILE", help="measure rank 0's steps after the first, and write their trace to FILE, for Perfetto")
    add("--backend", choices=("gloo", "nccl"), help="communication library (default: what fits this machine)")
    add("--weights", metavar="FILE|FOLDER", help="safetensors files to read instead of the weights that a PyTorch model has")
    add("--seed", type=int, default=0, metavar="S", help="seed of inputs and of absent weights (default: 0)")
    _rules_option(parser)
    _json_option(parser)


def _explain_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("operator", metavar="OP", nargs="?", help="an operator, a module path or a pattern such as '*attn*' (default: all, folded)")
    add("--model", metavar="MODEL", help="the model of the plan: adds layouts, collectives, bytes and times to what the plan file holds")
    _trust_option(parser)
    add("--cluster", metavar="NAME|FILE", help="price on this cluster (default: the plan's)")
    alternatives = (
        "with --model: the best plans with OP split otherwise; without OP, with other stages, micro-batches, recompute, ZeRO, offload"
    )
    add("--alternatives", action="store_true", help=alternatives)
    sensitivity = "with --model: at which link speed, memory and batch the plan becomes another"
    add("--sensitivity", action="store_true", help=sensitivity)
    add("--memory", metavar="80GiB", help="memory limit per device for these (default: the cluster's)")
    _trace_option(parser, "with --model: ")
    _rules_option(parser)
    _json_option(parser)


def _report_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("plan2", metavar="PLAN2", nargs="?", help="another plan file: adds what differs")
    add("-o", "--output", required=True, metavar="FILE", help="write the page, one file that asks for no other, to FILE (.html)")
    add("--model", metavar="MODEL", help="the model of PLAN: adds the timeline of every operator, what each communicates, known schemes")
    add("--no-compare", dest="compare", action="store_false", help="with --model: do not price the known schemes")
    add("--memory", metavar="80GiB", help="memory limit per device of the known schemes (default: the cluster's)")
    add("--cluster", metavar="NAME|FILE", help="price on this cluster (default: the plan's)")
    _trust_option(parser)
    _rules_option(parser)


def _convert_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    target = "dtensor and fsdp2: Python for PyTorch; hf-tp-plan and deepspeed: JSON; torchtitan: TOML; megatron: arguments"
    add("--to", required=True, choices=TARGETS, help=target)
    add("-o", "--output", metavar="FILE", help="write it to FILE (default: print it); what is left out is told on stderr")


def _discover_options(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "target",
        metavar="OPERATOR",
        help="namespace.name.overload, or package.module:function, which returns (operator or function, example inputs[, keyword "
        "arguments]), or is the function beside FUNCTION_inputs",
    )
    add("--inputs", metavar="6x4,int64:6", help="shapes of random example inputs, in the order of the operator's arguments")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="another argument of the operator, as JSON; repeatable")
    _rules_option(parser)
    _json_option(parser)


def _calibrate_options(parser: Parser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FILE", help="write the cluster to FILE (.json), for `autopar plan --cluster FILE`")
    _ranks_options(parser)
    add("--inside", metavar="FILE", help="cluster file of one node: the ranks, one a node, stand for such nodes")
    add("--name", help="name of the cluster (default: that of FILE)")
    add("--collectives", default="", metavar="all_reduce,...", help="which collectives, beside send (default: all)")
    add("--quick", action="store_true", help="sizes up to 4 MiB and fewer matrix products")
    add("--tolerance", type=float, default=0.1, metavar="FRACTION", help="repeats that differ by more are refused (default: 0.1)")
    _json_option(parser)


def _bench_options(parser: Parser) -> None:
    add = parser.add_argument
    _ranks_options(parser)
    sizes = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
    add("--sizes", default=sizes, metavar="1KiB,1MiB", help="bytes (default: 1 KiB to 64 MiB)")
    add("--collectives", default="", metavar="all_reduce,...", help="which collectives (default: all)")
    add("--cluster", metavar="NAME|FILE", help="whose prediction to compare with (default: local-cpu for gloo, dgx-h100 for nccl)")
    add("--plot", metavar="FILE", help="write bus bandwidth over bytes to FILE (.svg)")
    _json_option(parser)


def _ranks_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="number of forked ranks (default: one a core, at least 2); under torchrun, its ranks")
    add("--backend", choices=("gloo", "nccl"), help="communication library (default: what fits this machine)")


def _trust_option(parser: Parser) -> None:
    text = "read MODEL even where that executes code that the file holds (a .pt2 with pickled parts): only from a maker that you trust"
    parser.add_argument("--trust", action="store_true", help=text)


def _trace_option(parser: Parser, where: str = "") -> None:
    text = where + "write the predicted timeline of a step to FILE, for chrome://tracing or Perfetto"
    parser.add_argument("--trace", metavar="FILE", help=text)


def _rules_option(parser: Parser) -> None:
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
    """Sizes joined by x: 2x4."""
    return tuple(size_of(part, option) for part in text.split("x")) if text else ()
