"""The options of planning: one table, from which every other place takes what it needs.

From it are made the options of `autopar plan` and of the commands that share them
(`autopar/cli/shared_options.py`), the checks of Python's arguments (`checking.py`), the signature
and the parameters' part of the docstring of `autopar.plan` (`signature.py`), and the reference of
the command line. `PlanKeywords` and `PlanOptions` repeat the names with their static types; a test
holds them equal. An option has one name from Python to the search's `Request`; where the command
line spells it otherwise, its row says so in `flag`.
"""

from __future__ import annotations

from autopar.order.schedules import SCHEDULES

from .kinds import (
    BYTES,
    DIMS,
    DIMS_FORM,
    MESH,
    SECONDS,
    SHAPES,
    SHAPES_FORM,
    SHARE,
    SWITCH,
    SWITCHED,
    TEXTS,
    VALUES,
    VALUES_FORM,
    WHOLE,
)
from .option import Option
from .values import (
    ALTERNATE,
    DTYPES,
    MODES,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTED_MODULES,
    RECOMPUTES,
    SCHEMES,
    SEARCHES,
    TARGETS,
    ZEROS,
)

CLUSTER = (
    Option(
        name="devices",
        kind=WHOLE,
        metavar="N",
        help="number of devices, any from 1 up (default: all of the cluster)",
        told="number of devices, any from 1 up; by default all of the cluster",
    ),
    Option(
        name="cluster",
        metavar="NAME|FILE",
        help="a preset (autopar cluster list) or a file (default: this machine's GPUs, else "
        "dgx-h100)",
        told="a preset, a file or a `Cluster`; by default this machine's GPUs, else dgx-h100",
    ),
    Option(
        name="target",
        older=("--for", "--framework"),
        metavar="TARGET[@VERSION]",
        help="the project that runs the plan: the search stays within what `autopar convert --to "
        "TARGET` can say, and prices are of its kernels and habits: "
        + ", ".join(TARGETS)
        + " (default: autopar, its own runtime)",
        told="the project that runs the plan, with its version (`torchtitan@0.2`) or without: the "
        "search stays within what `autopar.convert` can say for it, and prices are of its kernels "
        "and habits: " + ", ".join(TARGETS) + "; by default this project's own runtime",
    ),
)
MODEL = (
    Option(
        name="mode",
        choices=MODES,
        default="train",
        help="plan a training step or an inference (default: train)",
        told='"train" for a training step, "infer" for an inference',
    ),
    Option(
        name="batch",
        kind=WHOLE,
        metavar="N",
        help="the global batch",
        told="the global batch; by default that of the model's inputs",
    ),
    Option(
        name="seq",
        kind=WHOLE,
        metavar="N",
        help="tokens of a sequence of an hf: model (default: 4096, or all its positions)",
    ),
    Option(
        name="image",
        kind=WHOLE,
        metavar="N",
        help="sides of an image of an hf: model, of diffusion: of its latent (default: its own; "
        "none beside a text)",
    ),
    Option(
        name="frames",
        kind=WHOLE,
        metavar="N",
        help="frames of a video or a sound of an hf: model (default: its own)",
    ),
    Option(
        name="dims",
        flag="--dim",
        kind=DIMS,
        metavar=DIMS_FORM,
        help="size of a named dim of an ONNX model; repeatable",
        told="sizes of named dims of an ONNX model",
    ),
    Option(
        name="shapes",
        flag="--shape",
        kind=SHAPES,
        metavar=SHAPES_FORM,
        help="shape of an input of an ONNX model; repeatable",
        told="shapes of inputs of an ONNX model",
    ),
    Option(
        name="values",
        flag="--value",
        kind=VALUES,
        metavar=VALUES_FORM,
        help="value of an input of an ONNX model, which is a constant then; repeatable",
        told="values of inputs of an ONNX model, which are constants then",
    ),
    Option(
        name="outputs",
        kind=TEXTS,
        default=(),
        metavar="NAME",
        help="tensor of an ONNX model to give in place of its outputs; repeatable; 'loss': a "
        "PyTorch model in training gives its loss alone (a configuration's does)",
        told="tensors of an ONNX model to give in place of its outputs; ('loss',): a PyTorch model "
        "in training gives its loss alone, and None for the others (a configuration's does)",
    ),
    Option(
        name="dtype",
        choices=DTYPES,
        help="floating-point type of the computation: weights and activations (default: the "
        "model's)",
        told="floating-point type of the computation; by default the model's",
    ),
    Option(
        name="precision",
        choices=PRECISIONS,
        help="recipe of linear products and experts: bf16, 8 bits with a scale for each tensor "
        "(fp8) or each block (fp8-block, mxfp8), or 4 bits (nvfp4); all else is in --dtype, by "
        "default bfloat16 then (default: products in the type of --dtype)",
        told="recipe of linear products and experts: " + ", ".join(PRECISIONS) + "; all else is in "
        "`dtype`, by default bfloat16 then; by default products are in the type of `dtype`",
    ),
    Option(
        name="master",
        choices=DTYPES,
        help="floating-point type in which parameters are stored and updated "
        "(default: float32 beside a 16-bit --dtype, else as computed)",
        told="floating-point type in which trained parameters are stored and updated; by default "
        "float32 beside a 16-bit `dtype`, else the type in which they are used",
    ),
    Option(
        name="reduce",
        choices=DTYPES,
        help="floating-point type in which gradients are added up and travel "
        "(default: that of --master)",
        told="floating-point type in which gradients are added up and travel; by default as "
        "`master`",
    ),
    Option(
        name="trust",
        kind=SWITCH,
        default=False,
        help="read MODEL even where that executes code that the file holds "
        "(a .pt2 with pickled parts): only from a maker that you trust",
        told="whether a `.pt2` file may execute code that it holds",
    ),
    Option(
        name="proof",
        kind=SWITCHED,
        help="run the imported graph beside the model, at small sizes, before it is planned "
        "(default: of modules, .pt2 files and configurations, once for each)",
        told="whether the imported graph is run beside the model, at small sizes, before it is "
        "planned; by default that of modules, archives and configurations, once for each",
    ),
    Option(
        name="frozen",
        kind=TEXTS,
        default=(),
        metavar="NAME",
        help="stored floats of an ONNX model that are constants, or parameters of an hf: model "
        "that are not trained; repeatable",
        told="names or patterns of an ONNX file's stored floats that are constants, "
        "whatever they look like, or of a configuration's parameters that are not trained",
    ),
    Option(
        name="trained",
        kind=TEXTS,
        default=(),
        metavar="NAME",
        help="stored floats that are parameters all the same; repeatable",
        told="names or patterns of stored floats that are parameters, whatever they look like",
    ),
    Option(
        name="optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="optimizer of the training step (default: adamw)",
        told="optimizer of the training step: " + ", ".join(OPTIMIZERS),
    ),
    Option(
        name="memory",
        kind=BYTES,
        metavar="80GiB",
        help="memory limit per device, in bytes or with a unit: MB, MiB, GB, GiB, ... "
        "(default: the cluster's)",
        told='memory limit per device: bytes, or a text with a unit ("80GiB"); '
        "by default the cluster's",
    ),
    Option(
        name="loss",
        metavar="MODULE:FUNCTION",
        help="loss(outputs, *inputs) of a PyTorch model "
        "(default: its scalar output, else mean squares)",
        told="`loss(outputs, *inputs)` of a PyTorch model, or its name as `module:function`; "
        "by default its scalar output, else mean squares",
    ),
)
SEARCH = (
    Option(
        name="search",
        choices=SEARCHES,
        default="dynamic_programming",
        help="search method (default: dynamic_programming, exact)",
        told="search method: " + ", ".join(SEARCHES),
    ),
    Option(
        name="gap",
        kind=SHARE,
        metavar="5%",
        help="end the search as soon as its plan is proven to be at most this far above the best, "
        "and look for such a plan, or its proof, for as long as there is anything left to look at "
        "(default: until nothing promises a faster plan)",
        told='the share above the best (0.05 or "5%") at which a plan is near enough, and which is '
        "looked for as long as there is anything left to look at; by default the search ends where "
        "nothing promises a faster plan",
    ),
    Option(
        name="seconds",
        kind=SECONDS,
        metavar="N",
        help="end the search after so many seconds, with the best plan so far and its gap; a first "
        "plan is waited for, and the next search may end with another (default: no limit)",
        told="seconds after which the search ends with the best plan so far, and its gap; a first "
        "plan is waited for, and the next search may end with another; by default no limit",
    ),
    Option(
        name="routing",
        default="even",
        metavar="even|worst|FILE",
        help="rows of each expert: even (default), the worst case, or a JSON file with counts of "
        "tokens for each expert, one row for all layers or one for each",
        told='rows of each expert: "even", "worst" (as many of each token\'s experts as possible '
        'on one rank), or a JSON file with counts of tokens for each expert (`{"counts": '
        "[...]}`, one row for all layers or one for each)",
    ),
)
PINS = (
    Option(
        name="mesh",
        kind=MESH,
        metavar="2x4",
        help="plan on this mesh (of a stage) only, outermost axis first (default: the best mesh)",
        told="mesh of a stage, or its sizes, outermost axis first; by default the best mesh",
    ),
    Option(
        name="scheme",
        metavar="NAME|AXIS:NAME,...",
        help=f"restrict the plan to a known scheme ({', '.join(SCHEMES)}; "
        "also PxDxT: pipeline, data, tensor; or a recipe: FSDP, TP8 x DP8), or each axis of --mesh "
        "to one",
        told="a known scheme (`autopar.schemes`) to which the plan is restricted",
    ),
    Option(
        name="stages",
        kind=WHOLE,
        metavar="N",
        help="number of pipeline stages (default: searched; 1 is no pipeline)",
        told="number of pipeline stages; by default searched; 1 is no pipeline",
    ),
    Option(
        name="micro_batches",
        kind=WHOLE,
        metavar="N",
        help="parts of the global batch that run one after the other (default: searched)",
        told="parts of the global batch that run one after the other; by default searched",
    ),
    Option(
        name="recompute",
        metavar=f"{'|'.join((*RECOMPUTES, ALTERNATE))}|MODULE,...",
        help="what is made again in the backward pass: all, all but what torchtitan's selective "
        "mode saves (alternate), or modules by Megatron's names "
        f"({', '.join(RECOMPUTED_MODULES)}) (default: searched)",
        told='what is made again in the backward pass: "none", "selective" or "full", all but what '
        'torchtitan\'s selective mode saves ("alternate"), or modules '
        f'by Megatron\'s names, as "core_attn,mlp" ({", ".join(RECOMPUTED_MODULES)}); '
        "by default searched",
    ),
    Option(
        name="zero",
        kind=WHOLE,
        choices=ZEROS,
        help="parameters: 0 stored whole, 1 split and gathered once a step (FSDP with "
        "reshard_after_forward=False), 2 with gradients split at every micro-batch, 3 gathered for "
        "every pass (default: searched)",
        told="parameters: 0 stored whole, 1 split and gathered once a step (FSDP with "
        "reshard_after_forward=False), 2 with gradients split at every micro-batch, 3 gathered for "
        "every pass; by default searched",
    ),
    Option(
        name="offload",
        choices=OFFLOADS,
        help="optimizer state that is in the memory of a device's host: none, "
        "or that of every parameter (default: searched)",
        told='optimizer state in the memory of a device\'s host: "none", or "optimizer" for that '
        "of every parameter; by default searched",
    ),
    Option(
        name="schedule",
        choices=tuple(SCHEDULES),
        help="order in which pipeline stages run micro-batches (default: searched)",
        told="order in which pipeline stages run micro-batches: " + ", ".join(SCHEDULES) + "; "
        "by default searched",
    ),
    Option(
        name="interleave",
        kind=WHOLE,
        metavar="N",
        help="chunks of the model that each stage holds (default: searched)",
        told="chunks of the model that each stage holds; by default searched",
    ),
    Option(
        name="overlap_experts",
        choices=("on", "off"),
        help="each backward pass merged with the forward pass of another micro-batch, so that the "
        "all-to-alls of experts run under them: on (with --stages and --micro-batches), off "
        "(default: on where it is faster and fits)",
        told='"on" merges each backward pass with the forward pass of another micro-batch, so '
        "that the all-to-alls of experts run under them (with `stages` and `micro_batches`); "
        '"off" does not; by default on where it is faster and fits',
    ),
    Option(
        name="pins",
        flag="--pin",
        kind=TEXTS,
        default=(),
        metavar="OP=AXIS:FACTOR,...",
        help="fix an operator (or a pattern) on mesh axes; repeatable",
        told='operators fixed on mesh axes, as texts such as `"OP=AXIS:FACTOR"`',
    ),
)
COMPARED = ("micro_batches", "recompute", "schedule", "interleave")
"""The pins that hold for the schemes of a comparison, whose names say how tensors are split."""
EARLIER_PLANS = (
    Option(
        name="load",
        flag="--strategy-load",
        metavar="FILE",
        help="use this plan as it is; it must match the model",
        told="a strategy checkpoint of this very model, used as it is",
    ),
    Option(
        name="reuse_from",
        flag="--reuse",
        metavar="FILE",
        help="keep the strategies of this plan that match the model, and search the rest",
        told="a strategy checkpoint of which the matching part is kept, and the rest searched",
    ),
)
RULES = (
    Option(
        name="rules",
        kind=TEXTS,
        metavar="MODULE",
        help="import this module first, for the rules that it registers (autopar.register_rule); "
        "repeatable",
    ),
    Option(
        name="discover",
        kind=SWITCH,
        default=False,
        help="find the rules of unknown operators by executing them on small shards "
        "(needs PyTorch)",
        told="whether to find the rules of unknown operators by executing them on small shards",
    ),
    Option(
        name="replicate_unknown",
        kind=SWITCH,
        default=False,
        help="have every device compute all of the operators that have no rule",
        told="whether every device computes all of the operators that have no rule",
    ),
)
PYTHON = (
    Option(
        name="compress",
        flag="",
        told="formats of gradients by parameter name or pattern, the last that fits counting: "
        '"float32", "bfloat16", "float16", or low-rank factors as "powersgd-4" '
        "(`autopar.sharding.gradient_formats`); or a number, the relative error of the gradients "
        "within which the formats are chosen that save most time. Needs gradients that are summed "
        "whole (ZeRO 0)",
    ),
    Option(
        name="progress",
        flag="",
        told="a function that is told how far the search is: `progress(done, of, what)`",
    ),
)
READING = (
    "batch",
    "dims",
    "shapes",
    "dtype",
    "precision",
    "loss",
    "frozen",
    "trained",
    "values",
    "outputs",
    "trust",
    "proof",
)
"""The options that say how a model is read, and go to `frontends.load.ModelOptions`."""
TABLE = {
    option.name: option
    for option in (*CLUSTER, *MODEL, *SEARCH, *PINS, *EARLIER_PLANS, *RULES, *PYTHON)
}
"""All options by name, in the order of the help text."""
IN_PYTHON = {name: option for name, option in TABLE.items() if option.told}
"""The options that `autopar.plan` has, in the order of its signature."""
PLANNED = tuple(
    name for name in IN_PYTHON if name not in {*READING, *(option.name for option in PYTHON)}
)
"""The options that go to `PlanOptions`, and through it to the search's request."""
