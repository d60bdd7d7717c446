"""The sizes of autoparallel's example of Llama-3-8B, which it plans, and ours, too."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "dim": 4096,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024,
    "rope_theta": 500000,
    "vocab_size": 128256,
    "max_seq_len": 8192,
}
