"""The commands of the command line with their options."""

from __future__ import annotations

import argparse
from typing import Any

from .. import __version__
from ..errors import UsageError
from .completion import SHELLS, shell_named
from .examples import examples
from .options import (
    DTYPES,
    FORMATS,
    MODELS,
    SEARCHES,
    TARGETS,
    Parser,
    json_option,
    model_options,
    pin_options,
    rules_option,
    trace_option,
    trust_option,
)
from .training_arguments import convert_options, doctor_options, show_options, train_options


def build_parser() -> Parser:
    """The commands and their options."""
    description = "Finds the cheapest way to split a neural network over many devices, and runs it."
    parser = Parser(prog="autopar", description=description, allow_abbrev=False)
    parser.add_argument("--verbose", action="store_true", help="beside any command: show where an error was raised")
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    _plan_options(_command(commands, "plan", "find the cheapest plan for a model on a cluster"))
    _run_options(_command(commands, "run", "run a plan on ranks of this machine"))
    train_options(_command(commands, "train", "train a model as a file says, resuming by itself"))
    _compare_options(_command(commands, "compare", "price the known schemes beside the plan found"))
    _explain_options(_command(commands, "explain", "tell how the operators of a plan are sharded, and why"))
    _report_options(_command(commands, "report", "write a plan, or two beside one another, as a page for the browser"))
    _convert_options(_command(commands, "convert", "write a plan as the configuration of another project"))
    _import_options(_command(commands, "import", "plan as a configuration of another project says, beside the plan found"))
    _what_if_options(_command(commands, "what-if", "plan again with other memory, links, devices or forced strategies"))
    _verify_options(_command(commands, "verify", "execute a sharding that someone else wrote, and name what is wrong"))
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
    _completion_options(_command(commands, "completion", "print a script that completes commands, options and files in a shell"))
    cluster = _command(commands, "cluster", "the clusters that autopar knows")
    kinds = cluster.add_subparsers(dest="cluster_command", metavar="list|show", required=True, parser_class=Parser)
    json_option(_command(kinds, "cluster list", "list the presets"))
    show = _command(kinds, "cluster show", "show a preset or a cluster file")
    show.add_argument("name", metavar="NAME", help="a preset or a .json, .yaml file")
    show.add_argument("--devices", type=int, metavar="N", help="size it to N devices")
    json_option(show)
    return parser


def options_of(parser: Parser) -> dict[str, list[str]]:
    """The options of every one-word command, by its name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: [option for action in command._actions for option in action.option_strings if option.startswith("--")]
        for name, command in commands.choices.items()
    }


def _command(commands: Any, name: str, text: str) -> Parser:
    """Add a parser to `commands` for the last word of `name`, the whole command."""
    description = text[0].upper() + text[1:] + "."
    made: Parser = commands.add_parser(
        name.split()[-1], help=text, description=description, epilog=examples(name), formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    made.set_defaults(parser=made)
    return made


def _plan_options(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODELS)
    add("-o", "--output", "--strategy-save", metavar="FILE", help="write the plan (the strategy checkpoint) to FILE")
    model_options(parser)
    add("--search", choices=SEARCHES, default="dynamic_programming", help="search method (default: dynamic_programming, exact)")
    pin_options(parser)
    add("--strategy-load", metavar="FILE", help="use this plan as it is; it must match the model")
    add("--reuse", metavar="FILE", help="keep the strategies of this plan that match the model, and search the rest")
    rules_option(parser)
    add("--discover", action="store_true", help="find the rules of unknown operators by executing them on small shards (needs PyTorch)")
    add("--replicate-unknown", action="store_true", help="have every device compute all of the operators that have no rule")
    trace_option(parser)
    schemes = "price known schemes beside the plan, or do not (default: beside one that took long, within a share of its time)"
    add("--compare", action=argparse.BooleanOptionalAction, help=schemes)
    add("--quiet", action="store_true", help="print nothing but errors")
    json_option(parser)


def _compare_options(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODELS)
    model_options(parser, several=True)
    add("--price", action="append", default=[], metavar="CLUSTER=2.5", help="price of a device and hour of a --cluster; repeatable")
    add("--target-step", metavar="500ms", help="name the cheapest cluster and number of devices within this time a step")
    add("--target-per-money", type=float, metavar="N", help="name the fastest with at least N samples for a unit of money")
    add("--plot", metavar="FILE", help="write samples a second over devices to FILE (.svg)")
    add("--scheme", action="append", default=[], metavar="NAME", help="a scheme to price, as of `plan --scheme`; repeatable (default: all)")
    rules_option(parser)
    json_option(parser)


def _run_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("--model", required=True, metavar="MODEL", help="the model that it was made for")
    trust_option(parser)
    add("--nproc", type=int, metavar="N", help="number of ranks (default, and only choice: the plan's devices)")
    add("--loss", metavar="MODULE:FUNCTION", help="the loss that was given to plan")
    add("--steps", type=int, default=1, metavar="K", help="training steps to run (default: 1)")
    add("--check", action="store_true", help="compare outputs, gradients and updated weights with one device")
    add("--profile", metavar="FILE", help="measure steps after the first, and write their trace to FILE, those of other stages beside it")
    add("--recalibrate", metavar="FILE", help="with --profile: write the cluster with its figures scaled to what was measured (.json)")
    add("--cluster", metavar="NAME|FILE", help="the cluster to recalibrate (default: the plan's)")
    add("--backend", choices=("gloo", "nccl"), help="communication library (default: what fits this machine)")
    add("--weights", metavar="FILE|FOLDER", help="safetensors files to read instead of the weights that a PyTorch model has")
    add("--seed", type=int, default=0, metavar="S", help="seed of inputs and of absent weights (default: 0)")
    rules_option(parser)
    json_option(parser)


def _explain_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("operator", metavar="OP", nargs="?", help="an operator, a module path or a pattern such as '*attn*' (default: all, folded)")
    add("--model", metavar="MODEL", help="the model of the plan: adds layouts, collectives, bytes and times to what the plan file holds")
    trust_option(parser)
    add("--cluster", metavar="NAME|FILE", help="price on this cluster (default: the plan's)")
    alternatives = (
        "with --model: the best plans with OP split otherwise; without OP, with other stages, micro-batches, recompute, ZeRO, offload"
    )
    add("--alternatives", action="store_true", help=alternatives)
    sensitivity = "with --model: at which link speed, memory and batch the plan becomes another"
    add("--sensitivity", action="store_true", help=sensitivity)
    add("--collectives", action="store_true", help="the collectives of a step by axis, phase and kind; with --model: by operator as well")
    add("--diff", metavar="PLAN2", help="what differs in another plan file: figures, outer choices, strategies, storage")
    add("--memory", metavar="80GiB", help="memory limit per device for these (default: the cluster's)")
    trace_option(parser, "with --model: ")
    rules_option(parser)
    json_option(parser)


def _report_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("plan2", metavar="PLAN2", nargs="?", help="another plan file: adds what differs")
    add("-o", "--output", required=True, metavar="FILE", help="write the page, one file that asks for no other, to FILE (.html)")
    add("--model", metavar="MODEL", help="the model of PLAN: adds the timeline of every operator, what each communicates, known schemes")
    add("--no-compare", dest="compare", action="store_false", help="with --model: do not price the known schemes")
    add("--alternatives", action="store_true", help="with --model: why operators are split so: other strategies, forced and solved again")
    add("--sensitivity", action="store_true", help="with --model: plan anew with other devices, link speeds, batches and memory")
    measured = "a measured step to set beside the prediction: what run --json printed, or a Chrome trace of torch.profiler"
    add("--measured", metavar="FILE", help=measured)
    add("--memory", metavar="80GiB", help="memory limit per device of the known schemes (default: the cluster's)")
    add("--cluster", metavar="NAME|FILE", help="price on this cluster (default: the plan's)")
    trust_option(parser)
    rules_option(parser)


def _convert_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    target = "dtensor, fsdp2 and pipelining: Python for PyTorch; hf-tp-plan and deepspeed: JSON; torchtitan: TOML; megatron: arguments"
    add("--to", required=True, choices=TARGETS, help=target)
    add("-o", "--output", metavar="FILE", help="write it to FILE (default: print it); what is left out is told on stderr")


def _import_options(parser: Parser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG", help="torchtitan's .toml, Megatron's arguments, DeepSpeed's .json, or a tp_plan as .json")
    add("--model", required=True, metavar="MODEL", help=MODELS)
    add("--from", dest="form", choices=FORMATS, help="the project that CONFIG belongs to (default: as it looks)")
    add("-o", "--output", metavar="FILE", help="write the configuration's plan to FILE")
    model_options(parser)
    add("--no-compare", dest="compare", action="store_false", help="do not search for the best plan beside it")
    rules_option(parser)
    json_option(parser)


def _what_if_options(parser: Parser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file")
    add("--model", required=True, metavar="MODEL", help="the model that it was made for")
    trust_option(parser)
    add("--memory", metavar="40GiB", help="with this memory per device")
    add("--link", action="append", default=[], metavar="LEVEL=0.5x", help="with another bandwidth of a level (a factor, or 100GB/s)")
    add("--devices", type=int, metavar="N", help="on so many devices")
    add("--cluster", metavar="NAME|FILE", help="on another cluster")
    add("--batch", type=int, metavar="N", help="with another global batch")
    add("--keep", action="store_true", help="keep the plan's mesh, stages, micro-batches and schedule where nothing else is said")
    pin_options(parser)
    add("-o", "--output", metavar="FILE", help="write the plan found to FILE")
    rules_option(parser)
    json_option(parser)


def _verify_options(parser: Parser) -> None:
    add = parser.add_argument
    case = "package.module:function returning a dict of module, inputs, parallelize(module, mesh), and perhaps loss and mesh"
    add("case", metavar="CASE", help=case + "; with --tp-plan, returning (module, example_inputs)")
    add("--tp-plan", metavar="FILE", help="a tensor-parallel plan of Hugging Face transformers (JSON) to verify on the module")
    add("--nproc", type=int, metavar="N", help="number of forked ranks (default: those of the case's mesh, else 2)")
    json_option(parser)


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
    rules_option(parser)
    json_option(parser)


def _calibrate_options(parser: Parser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FILE", help="write the cluster to FILE (.json), for `autopar plan --cluster FILE`")
    _ranks_options(parser)
    add("--inside", metavar="FILE", help="cluster file of one node: the ranks, one a node, stand for such nodes")
    add("--name", help="name of the cluster (default: that of FILE)")
    add("--collectives", default="", metavar="all_reduce,...", help="which collectives, beside send (default: all)")
    add("--quick", action="store_true", help="sizes up to 4 MiB and fewer matrix products")
    add("--tolerance", type=float, default=0.1, metavar="FRACTION", help="repeats that differ by more are refused (default: 0.1)")
    json_option(parser)


def _bench_options(parser: Parser) -> None:
    add = parser.add_argument
    _ranks_options(parser)
    sizes = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
    add("--sizes", default=sizes, metavar="1KiB,1MiB", help="bytes (default: 1 KiB to 64 MiB)")
    add("--collectives", default="", metavar="all_reduce,...", help="which collectives (default: all)")
    add("--cluster", metavar="NAME|FILE", help="whose prediction to compare with (default: local-cpu for gloo, dgx-h100 for nccl)")
    add("--plot", metavar="FILE", help="write bus bandwidth over bytes to FILE (.svg)")
    json_option(parser)


def _shell(name: str) -> str:
    """Check the name of a shell; argparse keeps the message of an `ArgumentTypeError` only."""
    try:
        return shell_named(name)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _completion_options(parser: Parser) -> None:
    names = "|".join(SHELLS)
    parser.add_argument("shell", metavar=names, choices=tuple(SHELLS), type=_shell, help="the shell that the script is for")


def _ranks_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--nproc", type=int, metavar="N", help="number of forked ranks (default: one a core, at least 2); under torchrun, its ranks")
    add("--backend", choices=("gloo", "nccl"), help="communication library (default: what fits this machine)")
