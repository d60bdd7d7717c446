"""The cases of the ablation: small and large models, dense and of experts, memory free and binding.

The quick ones have fewer devices than any other. A case with a share has that share of the memory
that its fastest plan takes.
"""

from __future__ import annotations

from benchmarks.planned.cases import Case

CASES = (
    Case(name="small-1-2", model="small", layers=1, batch=16, devices=2, quick=True),
    Case(
        name="llama3-8b-1-2-tight",
        model="llama3_8b",
        layers=1,
        batch=4,
        devices=2,
        share=0.7,
        quick=True,
    ),
    Case(name="llama3-8b-1-4", model="llama3_8b", layers=1, batch=4, devices=4, quick=True),
    Case(name="mixtral-1-2", model="mixtral_8x7b", layers=1, batch=4, devices=2, quick=True),
    Case(name="small-8", model="small", batch=16, devices=8),
    Case(name="small-8-tight", model="small", batch=16, devices=8, share=0.5),
    Case(name="small-8-least", model="small", batch=16, devices=8, share=0.2),
    Case(name="small-l40s-16", model="small", batch=64, cluster="l40s", devices=16),
    Case(name="small-experts-8", model="small_experts", batch=16, devices=8),
    Case(name="small-experts-8-tight", model="small_experts", batch=16, devices=8, share=0.6),
    Case(name="gpt2-8", model="gpt2", batch=8, devices=8),
    Case(name="gpt2-8-tight", model="gpt2", batch=8, devices=8, share=0.4),
    Case(name="gpt2-12", model="gpt2", batch=24, devices=12),
    Case(name="gpt2-64-tight", model="gpt2", batch=128, devices=64, share=0.5),
    Case(name="llama3-8b-2-8-tight", model="llama3_8b", layers=2, batch=16, devices=8, share=0.5),
    Case(name="llama3-8b-6-8-tight", model="llama3_8b", layers=6, batch=32, devices=8, share=0.35),
    Case(name="llama3-8b-8", model="llama3_8b", batch=64, devices=8),
    Case(name="llama3-8b-12", model="llama3_8b", batch=48, devices=12),
    Case(name="llama3-8b-a100-16", model="llama3_8b", batch=32, cluster="dgx-a100", devices=16),
    Case(name="llama3-8b-64", model="llama3_8b", batch=64, devices=64),
    Case(name="llama3-8b-64-tight", model="llama3_8b", batch=64, devices=64, share=0.4),
    Case(name="llama3-8b-256", model="llama3_8b", batch=256, devices=256),
    Case(name="mixtral-16", model="mixtral_8x7b", batch=64, devices=16),
    Case(name="mixtral-64-tight", model="mixtral_8x7b", batch=128, devices=64, share=0.5),
    Case(name="mixtral-256", model="mixtral_8x7b", batch=512, devices=256),
    Case(name="llama3-70b-64", model="llama3_70b", batch=64, devices=64),
    Case(name="llama3-70b-96-tight", model="llama3_70b", batch=96, devices=96, share=0.5),
    Case(name="llama3-70b-512", model="llama3_70b", batch=512, devices=512),
    Case(name="gpt3-175b-128", model="gpt3_175b", batch=256, cluster="dgx-a100-80g", devices=128),
    Case(
        name="gpt3-175b-1024-tight",
        model="gpt3_175b",
        batch=1536,
        cluster="dgx-a100-80g",
        devices=1024,
        share=0.5,
    ),
    Case(name="llama3-405b-1024", model="llama3_405b", batch=1024, devices=1024),
    Case(name="moe-1t-512", model="moe_1t", batch=1024, devices=512),
    Case(name="moe-1t-1024-tight", model="moe_1t", batch=2048, devices=1024, share=0.6),
)
CASES_BY_NAME = {case.name: case for case in CASES}
