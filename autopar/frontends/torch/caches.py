"""Switches off the key-value caches of language models, and batch norms that communicate.

A planned pass begins with an empty cache, and its statistics are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

NOTE = (
    "the key-value cache, an output for generation, is left out: the model was exported with "
    "use_cache=False"
)


def caching(module: torch.nn.Module) -> list[Any]:
    """The module's configurations that ask for a key-value cache.

    Transformers keeps them in `config`, also nested.
    """
    configurations: list[Any] = []  # told apart by identity: equal ones are switched off one by one
    waiting = [part.config for part in module.modules() if hasattr(part, "config")]
    while waiting:
        config = waiting.pop()
        if any(config is seen for seen in configurations) or not hasattr(config, "__dict__"):
            continue
        configurations.append(config)
        waiting += [value for value in vars(config).values() if hasattr(value, "use_cache")]
    return [config for config in configurations if getattr(config, "use_cache", None) is True]


@contextmanager
def on_one_device(module: torch.nn.Module) -> Iterator[None]:
    """While this lasts, no configuration in the module asks for a key-value cache, and synchronized
    batch norms, which run on GPUs alone, are plain ones.
    """
    asking = caching(module)
    parts = [part for part in module.modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    synchronized = [part for part in parts if "forward" not in vars(part)]
    for part in synchronized:
        part.forward = partial(torch.nn.BatchNorm1d.forward, part)  # type: ignore[method-assign]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for part in synchronized:
            del part.forward
        for config in asking:
            config.use_cache = True
