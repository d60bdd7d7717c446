"""Configurations in Python are read as they are meant, or refused with the line; none is run.

The texts are small ones of our own, in the forms of the public files that the names of the rows
tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.integrations.importing import read_configuration

HEAD = "from torchtitan.trainer import Trainer\n"
TOKENS = "TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 1024, max_context_length=1024)"


def registry(body: str, *, more: str = "") -> str:
    """A registry with one function."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{HEAD}{more}\ndef small() -> Trainer.Config:\n{lines}\n"


def recipe(body: str, *, name: str = "tiny_pretrain_16gpu_h100_bf16_config") -> str:
    """A recipe with one function that begins as public ones do."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return (
        "from megatron.bridge.recipes.common import _pretrain_common, _sft_common, _peft_common\n"
        f"def {name}() -> ConfigContainer:\n    cfg = _pretrain_common()\n{lines}\n    return cfg\n"
    )


REGISTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 8b: sections that are not set": (
        registry(
            f"return Trainer.Config(training={TOKENS}, activation_checkpoint=FullAC.Config())"
        ),
        {"zero": 3, "data": None, "local_batch": 4, "sequence": 1024, "recompute": "full"},
    ),
    "llama3 70b: degrees": (
        registry(
            f"return Trainer.Config(training={TOKENS},\n"
            "parallelism=ParallelismConfig(tensor_parallel_degree=8, context_parallel_degree=2))"
        ),
        {"tensor": 8, "context": 2, "sequence_parallel": True, "recompute": "alternate"},
    ),
    "llama3 405b: converters": (
        registry(
            'spec = model_registry("big", converters=[Float8LinearConverter.Config()])\n'
            f"return Trainer.Config(model_spec=spec, training={TOKENS})"
        ),
        {"precision": "fp8", "lost": ()},
    ),
    "qwen3: variants of another function": (
        registry(
            "config = base(8)\nconfig.training.disable_cuda_graphs = True\nreturn config",
            more="def base(tp: int):\n    return Trainer.Config(parallelism="
            "ParallelismConfig(tensor_parallel_degree=tp // 2), activation_checkpoint=None)\n",
        ),
        {"tensor": 4, "recompute": "none"},
    ),
    "qwen3.5: pieces replaced": (
        registry(
            f"config = Trainer.Config(training={TOKENS})\n"
            "config.parallelism = replace(config.parallelism, expert_parallel_degree=16)\n"
            "return config"
        ),
        {"expert": 16},
    ),
    "deepseek v3: stages and experts": (
        registry(
            f"config = Trainer.Config(training={TOKENS}, parallelism=ParallelismConfig(\n"
            'pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B",\n'
            "expert_parallel_degree=2, num_pp_microbatches=8))\nreturn config"
        ),
        {"stages": 2, "interleave": 2, "local_batch": 32, "micro_batch": 4, "expert": 2},
    ),
    "gpt oss: conditions on what is set": (
        registry(
            f"config = Trainer.Config(training={TOKENS}, parallelism=ParallelismConfig())\n"
            "if config.training.max_context_length > 512:\n"
            "    config.parallelism.context_parallel_degree = 4\n"
            "else:\n    config.parallelism.context_parallel_degree = 2\nreturn config"
        ),
        {"context": 4},
    ),
    "kimi k2: tokens of a step": (
        registry(
            "LENGTH = 2048\nreturn Trainer.Config(training=TrainingConfig(\n"
            "max_context_length=LENGTH, num_tokens_per_train_step=64 * LENGTH,\n"
            "num_tokens_per_microbatch_per_dp_rank=LENGTH))"
        ),
        {"batch": 64, "local_batch": 1, "sequence": 2048},
    ),
    "graph trainer: fields of another configuration": (
        registry(
            f"old = Trainer.Config(training={TOKENS}, parallelism=ParallelismConfig())\n"
            "d = {f.name: getattr(old, f.name) for f in fields(old)}\n"
            'd["activation_checkpoint"] = None\nreturn GraphTrainer.Config(**d)'
        ),
        {"local_batch": 4, "recompute": "none"},
    ),
    "configurations of February 2026": (
        registry(
            "return Trainer.Config(\ntraining=TrainingConfig(local_batch_size=8, seq_len=512),\n"
            'activation_checkpoint=ActivationCheckpointConfig(mode="full"),\n'
            "parallelism=ParallelismConfig(data_parallel_shard_degree=4))"
        ),
        {"local_batch": 8, "sequence": 512, "recompute": "full", "shards": 4, "data": 4},
    ),
    "whole values between layers": (
        registry(
            "return Trainer.Config(parallelism=ParallelismConfig("
            "tensor_parallel_degree=2, enable_sequence_parallel=False))"
        ),
        {"tensor": 2, "sequence_parallel": False},
    ),
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 8b: degrees and ranks in the name": (
        recipe(
            'cfg.model = AutoBridge.from_hf_pretrained("a/b").get_model_config()\n'
            "cfg.model.tensor_model_parallel_size = 4\ncfg.model.sequence_parallel = True\n"
            "cfg.model.context_parallel_size = 2\ncfg.train.global_batch_size = 512\n"
            "cfg.train.micro_batch_size = 1\ncfg.model.seq_length = 8192"
        ),
        {"tensor": 4, "context": 2, "data": 2, "batch": 512, "sequence": 8192, "zero": 1},
    ),
    "llama 70b: virtual stages": (
        recipe(
            "cfg.model.pipeline_model_parallel_size = 4\n"
            "cfg.model.virtual_pipeline_model_parallel_size = 5\n"
            "cfg.model.pipeline_dtype = torch.bfloat16"
        ),
        {"stages": 4, "interleave": 5, "schedule": "interleaved", "batch": 32, "micro_batch": 2},
    ),
    "values that recipes begin with": (
        recipe("cfg.validation.eval_iters = 1"),
        {"batch": 32, "micro_batch": 2, "sequence": 4096, "dtype": "bfloat16", "zero": 1},
    ),
    "qwen3 moe: experts": (
        recipe(
            "cfg.model.expert_model_parallel_size = 8\n"
            'cfg.model.moe_token_dispatcher_type = "alltoall"'
        ),
        {"expert": 8, "lost": ()},
    ),
    "deepseek v3: helpers of the file": (
        "def shared(cfg, tp=2):\n    cfg.model.tensor_model_parallel_size = tp\n"
        + recipe('shared(cfg, tp=4)\ncfg.model.recompute_granularity = "full"'),
        {"tensor": 4, "recompute": "full"},
    ),
    "benchmarks in mxfp8": (
        recipe('cfg.mixed_precision = _perf_precision("fp8_mx")'),
        {"precision": "mxfp8", "dtype": "bfloat16"},
    ),
    "blockwise fp8": (
        recipe(
            "cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()\n"
            'cfg.mixed_precision.fp8_recipe = "blockwise"'
        ),
        {"precision": "fp8-block"},
    ),
    "layouts by lists": (
        recipe(
            "cfg.model.pipeline_model_parallel_size = 2\n"
            'last = ["loss"]\ncfg.model.pipeline_model_parallel_layout = '
            '[["embedding"] + ["decoder"] * 2, ["decoder"] * 2 + last]'
        ),
        {"stages": 2, "interleave": 1},
    ),
    "gathers of parameters by Megatron-FSDP": (
        recipe(
            "cfg.ddp.use_megatron_fsdp = True\n"
            'cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"'
        ),
        {"zero": 3},
    ),
    "no distributed optimizer": (
        recipe(
            "cfg.ddp.use_distributed_optimizer = False\n"
            "cfg.optimizer.use_distributed_optimizer = False"
        ),
        {"zero": 0},
    ),
    "kimi k2: muon": (
        recipe("cfg.optimizer = distributed_muon_with_cosine_annealing()"),
        {"optimizer": "muon"},
    ),
    "selective recompute of modules": (
        recipe(
            'cfg.model.recompute_granularity = "selective"\n'
            'cfg.model.recompute_modules = ["core_attn", "mlp"]'
        ),
        {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")},
    ),
}


def read(text: str, folder: Path, **given: str) -> Any:
    path = folder / "file.py"
    path.write_text(text)
    return read_configuration(path, given=given)


@pytest.mark.parametrize("name", REGISTRIES)
def test_registries_of_torchtitan(name: str, tmp_path: Path) -> None:
    text, wanted = REGISTRIES[name]
    configuration = read(text, tmp_path)
    assert configuration.source == "torchtitan"
    assert {field: getattr(configuration, field) for field in wanted} == wanted


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_megatron_bridge(name: str, tmp_path: Path) -> None:
    text, wanted = RECIPES[name]
    configuration = read(text, tmp_path)
    assert configuration.source == "megatron-bridge"
    assert {field: getattr(configuration, field) for field in wanted} == wanted


def test_adapters_are_said(tmp_path: Path) -> None:
    text = recipe("cfg.peft = LoRA()").replace("cfg = _pretrain", "cfg = _peft")
    assert any("adapters" in line for line in read(text, tmp_path).lost)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (registry("return Trainer.Config("), "not Python"),
        (registry("return elsewhere()"), "line 4: what elsewhere(...) gives does not show"),
        (
            registry(
                "return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=x))"
            ),
            "line 4: tensor_parallel_degree is x, which is not read",
        ),
        (registry("return Controller.Config(batch=1)"), "no training and no parallelism"),
        (registry('raise ValueError("no")'), "line 4: raise ValueError"),
        (registry("return small()"), "nested too deeply"),
        (
            registry(
                f"c = Trainer.Config(training={TOKENS}, parallelism=ParallelismConfig())\n"
                "if environment():\n    c.parallelism.tensor_parallel_degree = 2\nreturn c"
            ),
            "line 6: tensor_parallel_degree is",
        ),
        (registry(f"return Trainer.Config(training={TOKENS.replace('4 * 1024', '1000')})"), "1000"),
        (recipe('cfg.mixed_precision = "half"'), "must be one of bf16_mixed"),
        (recipe("cfg.train.global_batch_size = batch"), "line 4: global_batch_size is batch"),
        (recipe("cfg = other()"), "line 4: what other(...) gives does not show"),
        (recipe("pass").replace("ConfigContainer:", "int:"), "of which project it is"),
    ],
)
def test_what_does_not_show_is_refused_with_the_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(text, tmp_path)
    assert said in str(error.value)


def test_one_of_several_functions_is_chosen(tmp_path: Path) -> None:
    text = registry(f"return Trainer.Config(training={TOKENS})")
    text += text.partition("\n")[2].replace("small", "large").replace("4 *", "2 *")
    with pytest.raises(UsageError, match=r"--set config=NAME, of small \(line 3\), large"):
        read(text, tmp_path)
    assert read(text, tmp_path, config="large").local_batch == 2
    with pytest.raises(UsageError, match="no function 'none'"):
        read(text, tmp_path, config="none")


def test_imported_files_beside_are_read(tmp_path: Path) -> None:
    base = tmp_path / "titan" / "models" / "config_registry.py"
    base.parent.mkdir(parents=True)
    base.write_text(
        registry(
            "return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=SIZE))",
            more="SIZE = 8\n",
        )
    )
    other = tmp_path / "titan" / "experiments" / "config_registry.py"
    other.parent.mkdir()
    other.write_text(
        "from titan.models.config_registry import small as base\nfrom ..models import nothing\n"
        "def large() -> Trainer.Config:\n    return base()\n"
    )
    assert read_configuration(other).tensor == 8


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f'open({str(mark)!r}, "w")\n' + registry(
        f'open({str(mark)!r}, "w")\nreturn Trainer.Config(training={TOKENS})'
    )
    assert read(text, tmp_path).local_batch == 4 and not mark.exists()


@pytest.mark.parametrize("body", ["x = [0] * 10**9", "x = 10**18", "for i in range(10**9): pass"])
def test_large_sums_are_not_made(body: str, tmp_path: Path) -> None:
    text = registry(f"{body}\nreturn Trainer.Config(training={TOKENS})")
    assert read(text, tmp_path).local_batch == 4
