"""torchtitan's training, parallelism and activation checkpointing, as its versions take them.

Since February 2026 a configuration is what a function of a model's `config_registry` returns; ours
sets the plan's values in one. Up to 0.2 it is a TOML file, of which ours has the sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.errors import UsageError
from autopar.order import schedules

from .precisions import words_of
from .reach import FOLDED, REPLICAS, WEIGHTS, Reach, lacks
from .setup import Converted, Setup
from .stage_layers import StageLayers, stage_layers

TARGET = "torchtitan"
RELEASE = "torchtitan 0.3.0"
COMMIT = "pytorch/torchtitan@b5bcd76c66 (2026-08-21)"
"""The sources that the names of the function are taken from."""
LAST_TOML = (0, 2)
"""The last version that reads TOML."""
RELEASED = (0, 3)
"""The last version that was released, which counts in samples; later ones count in tokens."""
HEAD = "lm_head"
HEAD_0_2 = "output"
SCHEDULES = {
    row.name: row.other_names.torchtitan
    for row in schedules.SCHEDULES.values()
    if row.other_names.torchtitan
}
OPTIMIZERS = {"adamw": "AdamW"}
TYPES = ("float32", "bfloat16")
SELECTIVE = ("selective", "core_attn")
"""What becomes its own selective recompute, which is the plan's "alternate"."""
RECOMPUTES = {"none": "None", "full": "FullAC.Config()"}
_COMMON = Reach(
    axes=(*REPLICAS, *WEIGHTS, *FOLDED, "expert", "context"),
    zeros=(0, 2, 3),
    recomputes=("none", "alternate", "full"),
    near=(1, *SELECTIVE),
    optimizers=tuple(OPTIMIZERS),
)
REACH = (
    _COMMON,
    # Stages sum whole gradients and reduce them once a step.
    replace(
        _COMMON, zeros=(0, 1), near=(2, 3, *SELECTIVE), stages=(2, 0), schedules=tuple(SCHEDULES)
    ),
)


def torchtitan(setup: Setup, version: str | None = None) -> Converted:
    """A function that sets a configuration of its registries, or for `version` 0.2 the sections."""
    number = _number(version)
    toml = number is not None and number <= LAST_TOML
    more = [] if toml else _function_lacks(setup)
    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup), *more, _parts_of_experts(setup))
    lost = [*setup.lost, *setup.minor(), *_losses(setup)]
    if toml:
        lost += _toml_losses(setup)
        sections: dict[str, Mapping[str, object]] = {
            "training": _training(setup),
            "parallelism": _parallelism(setup, HEAD_0_2) | _of_0_2(setup),
            "activation_checkpoint": {
                "mode": setup.recompute if setup.recompute in RECOMPUTES else "selective"
            },
            "optimizer": {"name": OPTIMIZERS[setup.plan.model.optimizer]},
            **_converters(setup),
        }
        return Converted(text=_toml(sections, lost), lost=tuple(lost))
    if words_of(setup.plan) is not None:
        lost.append(
            f"products in {setup.plan.model.precision}: a model's registry takes the converters of "
            "products, which nothing sets afterwards"
        )
    lost.append("the optimizer and its learning rate stay those of the configuration")
    in_samples = number is not None and number <= RELEASED
    return Converted(text=_function(setup, lost, in_samples=in_samples), lost=tuple(lost))


def _parts_of_experts(setup: Setup) -> str:
    """The complaint about experts that are split, and each of them, too.

    They lie on the ranks of shards, sequences and weights together.
    """
    if setup.degree("expert") > 1 and setup.inside_experts > 1:
        return f"weights of each expert over {setup.inside_experts} ranks beside split experts"
    return ""


def _converters(setup: Setup) -> dict[str, Mapping[str, object]]:
    """The sections of the converter that brings products to a recipe."""
    words = words_of(setup.plan)
    if words is None or not words.titan:
        return {}
    return {"model": {"converters": [words.titan]}, words.titan: dict(words.options)}


def _toml_losses(setup: Setup) -> Iterable[str]:
    """Sentences on what became possible later."""
    if (words := words_of(setup.plan)) is not None:
        if words.titan:
            yield "its converters of products leave layers of experts as they are"
        else:
            yield f"products in {setup.plan.model.precision}: it has no converter for them"
    if _is_replicated_beside(setup):
        stage = " (ZeRO 2)" if setup.stages == 1 else ""
        yield (
            f"parameters are stored split over the data axes and gathered once a step{stage}: it "
            "has no replicas beside other parallelism (DDP on more than one dim)"
        )
    if setup.degree("tensor") > 1 and not setup.sequence_parallel:
        yield (
            "activations between tensor-parallel layers are split along the sequence there; the "
            "plan keeps them whole"
        )


def _number(version: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version; None for the present one."""
    if version is None:
        return None
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\d+)*", version)
    if match is None:
        raise UsageError(f"--version {version!r} is no version of torchtitan, such as 0.2 or 0.3")
    return int(match[1]), int(match[2])


def _function_lacks(setup: Setup) -> Iterable[str]:
    """Parts of a plan that the present configuration cannot say, and the one with TOML could."""
    if not setup.sequence:
        yield "inputs without a sequence of tokens"
    if setup.plan.schedule.reduce not in (None, "float32"):
        yield f"gradients that travel in {setup.plan.schedule.reduce}"


def _losses(setup: Setup) -> Iterable[str]:
    """Sentences on parts of a plan that become something else."""
    if setup.recompute in SELECTIVE:
        yield "its selective recompute keeps other operators than the plan"
    if (layout := stage_layers(setup.plan)) is not None:
        yield from layout.moved()
    elif setup.stages > 1:
        yield "layers are cut into stages by torchtitan: the plan's names do not number them"
    if setup.degree("expert") > 1 and not setup.zero:
        yield (
            "its experts lie on the ranks of sharded data parallelism, so that all other "
            "parameters are stored split there, too; the plan stores them whole"
        )
    yield from setup.of_whole_stages()
    if setup.stages == 1 and setup.plan.schedule.micro_batches > 1:
        if setup.zero == 1:
            yield "gradients are reduced at every micro-batch (ZeRO 2)"
        if setup.zero in (1, 2):
            yield "parameters are gathered for every micro-batch, and stay until its end"


def _training(setup: Setup) -> Mapping[str, object]:
    # With stages, torchtitan cuts the local batch of a whole step into micro-batches itself.
    local = setup.local_batch
    if setup.stages > 1:
        local = setup.batch // setup.degree("data", "expert")
    table: dict[str, object] = {"local_batch_size": local, "global_batch_size": setup.batch}
    if setup.sequence:
        table["seq_len"] = setup.sequence
    table |= _types(setup)
    if setup.plan.schedule.reduce in TYPES:
        table["mixed_precision_reduce"] = setup.plan.schedule.reduce
    return table


def _types(setup: Setup) -> Mapping[str, object]:
    """The types of the computation, and of stored parameters where these are not float32."""
    dtype = setup.parameter_type(TYPES)
    if dtype is None:
        return {}
    stored = setup.plan.schedule.master or dtype
    return {"mixed_precision_param": dtype} | ({} if stored == "float32" else {"dtype": stored})


def _parallelism(setup: Setup, head: str) -> dict[str, object]:
    """The degrees; `head`: its name of the last layer."""
    shards = setup.shards if setup.zero else 1
    table: dict[str, object] = {
        "data_parallel_replicate_degree": setup.degree("data") // shards,
        "data_parallel_shard_degree": shards * setup.degree("expert"),
        # The value "default" depends on whether there are stages, so the plan's own is written.
        "fsdp_reshard_after_forward": "always" if setup.zero == 3 else "never",
        "tensor_parallel_degree": setup.degree("tensor"),
        "context_parallel_degree": setup.degree("sequence"),
        "expert_parallel_degree": setup.experts,
        "pipeline_parallel_degree": setup.stages,
    }
    if setup.stages > 1:
        table["pipeline_parallel_schedule"] = SCHEDULES[setup.plan.schedule.pipeline]
        if (layout := stage_layers(setup.plan)) is not None:
            table["module_fqns_per_model_part"] = _modules(layout, head)
    return table


def _of_0_2(setup: Setup) -> dict[str, object]:
    """Degrees that version 0.2 takes otherwise."""
    table: dict[str, object] = {}
    if setup.stages > 1:
        table["pipeline_parallel_microbatch_size"] = setup.local_batch
    if _is_replicated_beside(setup):
        table["data_parallel_replicate_degree"] = 1
        table["data_parallel_shard_degree"] = setup.degree("data")
    return table


def _is_replicated_beside(setup: Setup) -> bool:
    """Whether whole replicas stand beside another kind of work, which 0.2 refuses."""
    other = setup.stages * setup.degree("tensor", "sequence", "expert")
    return not setup.zero and setup.degree("data") > 1 and other > 1


def _modules(layout: StageLayers, head: str) -> list[list[str]]:
    """The modules of every chunk, by their names in its decoders."""
    parts = [[f"layers.{layer}" for layer in layers] for layers in layout.chunks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _in_tokens(setup: Setup) -> dict[str, object]:
    """The training with sizes in tokens."""
    tokens = setup.sequence or 0
    return {
        "num_tokens_per_microbatch_per_dp_rank": setup.local_batch * tokens,
        "num_tokens_per_train_step": setup.batch * tokens,
        "max_context_length": tokens,
        **_types(setup),
    }


def _function(setup: Setup, lost: Sequence[str], *, in_samples: bool) -> str:
    """The function of Python, with sizes in samples or in tokens."""
    training = dict(_training(setup)) if in_samples else _in_tokens(setup)
    parallelism = _parallelism(setup, HEAD)
    parallelism["enable_sequence_parallel"] = setup.sequence_parallel
    # Graphs of neither stages nor rows of experts can be captured.
    if setup.stages > 1 or setup.has_experts:
        training["disable_cuda_graphs"] = True
    if setup.stages > 1:
        if in_samples:
            parallelism["pipeline_parallel_microbatch_size"] = setup.local_batch
        else:
            parallelism["num_pp_microbatches"] = setup.plan.schedule.micro_batches
    set_to = [f"    config.training.{key} = {value!r}" for key, value in training.items()]
    set_to += [f"    config.parallelism.{key} = {value!r}" for key, value in parallelism.items()]
    checkpoint = RECOMPUTES.get(setup.recompute, "SelectiveAC.Config()")
    wanted = checkpoint.partition(".")[0]
    imported = f"from torchtitan.distributed.activation_checkpoint import {wanted}\n"
    return _FILE.format(
        source=RELEASE if in_samples else COMMIT,
        notes="".join(f"#   {note}\n" for note in lost),
        imported=imported if checkpoint != "None" else "",
        values="\n".join([*set_to, f"    config.activation_checkpoint = {checkpoint}"]),
    )


def _toml(sections: Mapping[str, Mapping[str, object]], lost: Sequence[str]) -> str:
    lines = [f"# {note}" for note in lost]
    for name, values in sections.items():
        lines += [
            "",
            f"[{name}]",
            # Numbers and texts without odd characters are written alike in JSON and in TOML.
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


_FILE = """# A plan as torchtitan takes it, by the names of {source}.
# In a model's config_registry.py: return planned(llama3_8b()), or another of its configurations.
{notes}{imported}

def planned(config: "Trainer.Config") -> "Trainer.Config":  # noqa: F821
{values}
    return config
"""
