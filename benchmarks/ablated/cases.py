"""The cases of the ablation: small and large models, dense and of experts, memory free and binding.

A name has the model, its layers where they are fewer than the real ones, and the devices. The quick
cases have fewer devices than any other. A case with a share has that share of the memory that its
fastest plan takes.
"""

from __future__ import annotations

from typing import Any

from benchmarks.planned.cases import Case

A100 = "dgx-a100-80g"


def _case(model: str, layers: int, devices: int, batch: int, **options: Any) -> Case:
    """A model cut to a few layers, which is what folding makes of equal ones, on some devices."""
    tight = "-tight" if "share" in options else ""
    name = f"{model.replace('_', '-')}-{layers}-{devices}{tight}"
    return Case(name=name, model=model, layers=layers, devices=devices, batch=batch, **options)


CASES = (
    _case("small", 1, 2, 16, quick=True),
    _case("llama3_8b", 1, 2, 4, share=0.7, quick=True),
    _case("llama3_8b", 1, 4, 4, quick=True),
    _case("mixtral_8x7b", 1, 2, 4, quick=True),
    _case("small", 1, 8, 16),
    _case("small", 2, 8, 16, share=0.6),
    _case("small_experts", 1, 8, 16),
    _case("small_experts", 1, 8, 16, share=0.7),
    _case("small", 2, 16, 64, cluster="l40s"),
    _case("gpt2", 2, 8, 8),
    _case("gpt2", 2, 12, 24),
    _case("gpt2", 2, 16, 64, share=0.6),
    _case("llama3_8b", 1, 8, 16, share=0.5),
    _case("llama3_8b", 2, 8, 16),
    _case("llama3_8b", 2, 16, 32, cluster="dgx-a100"),
    _case("llama3_8b", 4, 64, 64),
    _case("llama3_8b", 2, 64, 64, share=0.5),
    _case("mixtral_8x7b", 1, 8, 16, share=0.6),
    _case("mixtral_8x7b", 2, 16, 64),
    _case("mixtral_8x7b", 2, 64, 128, share=0.6),
    _case("llama3_70b", 2, 64, 64),
    _case("llama3_70b", 4, 96, 96, share=0.5),
    _case("llama3_70b", 4, 256, 256),
    _case("gpt3_175b", 4, 128, 256, cluster=A100, share=0.5),
    _case("llama3_405b", 2, 512, 512, share=0.7),
    _case("llama3_405b", 4, 1024, 1024),
    _case("moe_1t", 2, 256, 512),
    _case("moe_1t", 2, 1024, 2048, share=0.6),
)
CASES_BY_NAME = {case.name: case for case in CASES}
