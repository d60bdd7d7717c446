"""The `DistributedConfig` of Hugging Face transformers: degrees, styles of modules, FSDP2's units.

A model is loaded with it: `from_pretrained(name, distributed_config=CONFIG)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .fsdp2 import precision_of, units_of
from .linears import splits_of
from .reach import PARTLY, REPLICAS, Reach, lacks
from .setup import Converted, Setup
from .splittable import BY_STYLE
from .styles import splits_lack, style_of

TARGET = "transformers"
VERSION = "5.23.0"
"""The release whose names and values are written."""
REACH = (
    # Replicas are those of the training's own data parallelism.
    Reach(axes=("data", "tensor"), zeros=(0,), needed=("tensor",), infers=True, weights=BY_STYLE),
    Reach(
        axes=(*REPLICAS, "tensor"),
        needed=("shard",),
        zeros=(2, 3),
        near=(1, *PARTLY),
        weights=BY_STYLE,
    ),
)
POLICY = ("torch.bfloat16", "torch.float32")
"""The only types of computation and of travelling gradients beside those of the parameters."""


def distributed_config(setup: Setup) -> Converted:
    """The file: `CONFIG`."""
    setup.refuse(TARGET, *setup.mixed(share=1), *lacks(REACH, setup))
    styles: dict[str, str] = {}
    if setup.degree("tensor") > 1:
        splits = splits_of(setup, TARGET)
        setup.refuse(TARGET, *splits_lack(splits))
        styles = {name: style_of(split) for name, split in splits.items()}
    fields = _fields(setup, styles)
    lost = tuple(_losses(setup, fields))
    text = _FILE.format(
        version=VERSION,
        notes="".join(f"#   {note}\n" for note in lost),
        fields="\n".join(f"    {name}={value!r}," for name, value in fields.items()),
    )
    return Converted(text=text, lost=lost)


def _fields(setup: Setup, styles: Mapping[str, str]) -> dict[str, object]:
    fields: dict[str, object] = {"tp_size": setup.degree("tensor")}
    if styles:
        fields["tp_plan"] = dict(styles)
    if setup.shards > 1:
        fields["fsdp_size"] = setup.shards
        fields["dp_replicate_size"] = setup.degree("data") // setup.shards
        style = "free_full_weight" if setup.zero == 3 else "keep_full_weight"
        fields["fsdp_plan"] = dict.fromkeys(units_of(setup.plan), style)
        fields["fsdp_mixed_precision"] = precision_of(setup) == POLICY
    return fields


def _losses(setup: Setup, fields: Mapping[str, object]) -> Iterable[str]:
    """Sentences on parts of a plan that are set elsewhere, or become something else."""
    yield from setup.lost
    if fields.get("tp_plan"):
        yield "of modules that the plan keeps whole, the model's own tp_plan may split some"
    types = precision_of(setup)
    if types not in (POLICY, ("None", "None")):
        yield (
            f"computing in {types[0]} and summing gradients in {types[1]} (None: as parameters) is "
            "not said: FSDP2 computes in the type of the parameters"
        )
    if setup.shards == 1 and (copies := setup.degree("data")) > 1:
        yield f"data parallelism over {copies} devices is set beside it"
    if setup.zero == 1:
        yield "gradients are reduced at every micro-batch (ZeRO 2)"
    micro_batches = setup.plan.schedule.micro_batches
    yield (
        f"per_device_train_batch_size={setup.local_batch} and gradient_accumulation_steps="
        f"{micro_batches} are arguments of the training"
    )
    if setup.recompute != "none":
        yield f"recompute ({setup.recompute}) is gradient_checkpointing=True of the training"


_FILE = """# A plan as transformers {version} takes it.
# The model is loaded with it: from_pretrained(name, distributed_config=CONFIG).
{notes}
from transformers.distributed import DistributedConfig

CONFIG = DistributedConfig(
{fields}
)
"""
