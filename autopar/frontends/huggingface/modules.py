"""The module of a configuration, by its type's own code in transformers or diffusers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autopar.errors import ModelError, UsageError

from . import diffusion
from .chances import without_chances
from .file import File, plain_keys, read_configuration
from .made import Configured, first_line, quiet_and_offline, stored_or_drawn

PROJECT = "transformers"
TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
    "AutoModelForMultimodalLM",
    "AutoModel",
)
"""Classes of transformers that make a model for a task, in the order in which they are tried."""


def configured(path: str | Path, dtype: str) -> Configured:
    """The module that a configuration describes, by transformers or, of its classes, diffusers.

    Raises `ModelError` if the file describes no model that these can make, and `UsageError` if they
    are not installed or do not know the type.
    """
    return made_of(read_configuration(path), dtype)


def made_of(file: File, dtype: str) -> Configured:
    """The module that a configuration's keys describe; raises as `configured`."""
    if diffusion.CLASS in file.keys:
        return diffusion.configured(file, dtype)
    with quiet_and_offline(str(file.path), PROJECT):
        config = _config(file)
        chances = without_chances(config)
        task = _task(config)
        with _on_meta():
            module = _made(file, task, config, dtype)
    fresh = partial(_made, file, task, config, dtype)
    return Configured(
        kind=str(file.keys["model_type"]),
        project=PROJECT,
        module=module,
        task=task.__name__,
        config=config,
        fresh=fresh,
        build=stored_or_drawn(file, partial(_read, file, task, config, dtype), fresh),
        notes=(*_notes(file, module, dtype), *chances),
    )


def whole_keys(file: File) -> dict[str, Any]:
    """The keys of a configuration with those that its type has by default, nested ones too."""
    if diffusion.CLASS in file.keys:
        return diffusion.whole_keys(file)
    with quiet_and_offline(str(file.path), PROJECT):
        return plain_keys(_config(file).to_dict())


def known_types() -> dict[str, str]:
    """The types that transformers can make a module of, each with its first task."""
    with quiet_and_offline("autopar models", PROJECT):
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        known: dict[str, str] = {}
        for name in TASKS:
            task = getattr(transformers, name, None)
            for kind in getattr(getattr(task, "_model_mapping", None), "_model_mapping", ()):
                if kind in CONFIG_MAPPING:
                    known.setdefault(kind, name)
        return dict(sorted(known.items()))


def _config(file: File) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = dict(file.keys)
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(f"{file.path}: model_type is missing")
    if kind not in CONFIG_MAPPING:
        named = _type_of_class(keys.get("architectures"))
        if named is None:
            raise UsageError(_unknown(file, kind, sorted(CONFIG_MAPPING)))
        kind = named
    try:
        return AutoConfig.for_model(kind, **keys)
    except Exception as error:  # every class checks its keys in a way of its own
        raise ModelError(f"{file.path}: {first_line(error)}") from error


def _type_of_class(classes: Any) -> str | None:
    """The type of the first class of transformers among a file's `architectures`."""
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    kinds = {name: kind for table in tables for kind, name in table.items()}
    named = classes if isinstance(classes, list) else []
    return next((kinds[name] for name in named if isinstance(name, str) and name in kinds), None)


def _unknown(file: File, kind: str, known: list[str]) -> str:
    near = difflib.get_close_matches(kind, known, n=5)
    text = f"{file.path}: transformers has no model_type {kind!r}"
    if near:
        text += f"; of its {len(known)} types the nearest are {', '.join(near)}"
    if file.code:
        text += f". Its own code ({file.code}) is not executed"
    return text


def _task(config: Any) -> Any:
    """The class of transformers for the configuration's first architecture, or for its type."""
    import transformers

    tasks = [getattr(transformers, name) for name in TASKS if hasattr(transformers, name)]
    fitting = [task for task in tasks if type(config) in task._model_mapping]
    wanted = (getattr(config, "architectures", None) or [""])[0]
    for task in fitting:
        made = task._model_mapping[type(config)]
        if wanted in [cls.__name__ for cls in (made if isinstance(made, tuple) else (made,))]:
            return task
    if not fitting:
        raise ModelError(f"transformers has no module for {type(config).__name__}")
    # A decoder alone is a causal model too.
    whole = [task for task in fitting if "Seq2Seq" in task.__name__]
    return whole[0] if whole and config.is_encoder_decoder else fitting[0]


def _made(file: File, task: Any, config: Any, dtype: str) -> Any:
    import torch

    try:
        return task.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        ).train()
    except Exception as error:  # whatever the type's own code says of wrong sizes
        raise ModelError(f"{file.path}: {first_line(error)}") from error


def _on_meta() -> Any:
    import torch

    return torch.device("meta")


def _read(file: File, task: Any, config: Any, dtype: str) -> Any:
    import torch

    with quiet_and_offline(str(file.path), PROJECT):
        return task.from_pretrained(
            file.folder,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        ).train()


def _notes(file: File, module: Any, dtype: str) -> Iterator[str]:
    kind = file.keys["model_type"]
    if kind != module.config.model_type:
        name = type(module).__name__
        yield f"transformers has no type {kind}: it is built as {name}, which its file names"
    if file.stored:
        yield f"its weights are stored as {file.stored}; the plan trains them in {dtype}"
    if file.code:
        name = type(module).__name__
        yield f"its own code ({file.code}) is not executed: {name} is that of transformers"
    further = file.keys.get("num_nextn_predict_layers") or 0
    if further and not any("mtp" in name for name, _ in module.named_modules()):
        yield (
            f"its layers of multi-token prediction ({further}) are not in "
            f"{type(module).__name__}, and not planned"
        )
