"""Models of classes of transformers at the sizes of public models, on the meta device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from autopar.configured import load_configured
from autopar.frontends.load import ModelOptions
from autopar.ir import Graph

from .models import quiet

SIZES: dict[str, dict[str, Any]] = {
    # microsoft/swin-large-patch4-window7-224
    "SwinForImageClassification": {
        "embed_dim": 192,
        "depths": [2, 2, 18, 2],
        "num_heads": [6, 12, 24, 48],
    },
    # facebook/sam-vit-huge
    "SamVisionModel": {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "global_attn_indexes": [7, 15, 23, 31],
    },
    "JambaForCausalLM": {"use_mamba_kernels": False, "max_position_embeddings": 4096},
}
"""The sizes of public models where the defaults of their classes are not those."""


def of_class(name: str, batch: int) -> Graph:
    """A model of a class of transformers, at its default sizes (`SIZES`), on the meta device."""
    import transformers

    kind = getattr(transformers, name)
    configuration = kind.config_class(**SIZES.get(name, {}), architectures=[name])
    with quiet(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(configuration.to_json_string(use_diff=False))
        return load_configured(str(path), ModelOptions(batch=batch)).graph
