"""The forms in which public projects write their layouts: each is read as it is meant, or refused
with the line and what to give. The texts are small ones of our own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.integrations.importing import read_configuration

LAYOUT = "--tensor-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 64"
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Megatron-LM: examples/*/train_*.sh
    "arguments that are paths": (
        "a.sh",
        f'LOAD=$1\nDATA=${{2:-"MOCK"}}\nmkdir -p "$(dirname "$LOAD")"\n'
        f"torchrun pretrain_gpt.py {LAYOUT} --load $LOAD --data-path $DATA",
        {"tensor": 4, "batch": 64},
    ),
    "arrays with comments": (
        "a.sh",
        "TP=4\nARGS=(\n  --tensor-model-parallel-size $TP # of 8\n  # --bf16\n"
        '  "--micro-batch-size 2"\n)\ntorchrun x.py "${ARGS[@]}"',
        {"tensor": 4, "micro_batch": 2, "dtype": None},
    ),
    "arrays that are made of themselves": (
        "a.sh",
        f'A=({LAYOUT})\nFSDP=1\nif [ $FSDP = 1 ]; then\nA=("${{A[@]}}" --use-torch-fsdp2)\nfi\n'
        "python x.py ${A[@]}",
        {"tensor": 4, "zero": 3},
    ),
    "conditions on what the script sets": (
        "a.sh",
        'DTYPE="fp8"; DEBUG=1\nif [[ $DTYPE == "fp8" ]]; then\n  P=bf16\n'
        "elif [ $DTYPE = x ]; then\n  P=fp16\nfi\n"
        "if [[ $DEBUG -eq 1 && $DTYPE != x ]]; then\n  TP=2\nelse\n  TP=8\nfi\n"
        "python x.py --tensor-model-parallel-size $TP --$P",
        {"tensor": 2, "dtype": "bfloat16"},
    ),
    "defaults behind tests for nothing": (
        "a.sh",
        'if [ -z "$TP" ]; then\n  TP=2\nfi\nPP=${PP:-4}\n[ -n "$X" ] && TP=8\n'
        "python x.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP",
        {"tensor": 2, "stages": 4},
    ),
    "guards that end in failure": (
        "a.sh",
        "if [ $# -ne 2 ]; then\n  echo usage\n  exit 1\nfi\n"
        f"mkdir -p x || {{\n  echo no\n  exit 1\n}}\npython x.py {LAYOUT}",
        {"tensor": 4},
    ),
    "loops over the caller's arguments": (
        "a.sh",
        "Z=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    -z|--zero) Z=$2; shift ;;\n"
        "    *) exit 1;;\n  esac\n  shift\ndone\n"
        f"deepspeed x.py {LAYOUT} --deepspeed --zero-stage $Z",
        {"tensor": 4, "zero": 1},
    ),
    "functions and eval": (
        "a.sh",
        f'train() {{\n  local tp=$1\n  O=" {LAYOUT} --pipeline-model-parallel-size $tp"\n'
        '  cmd="deepspeed x.py $@ $O"\n  eval ${cmd}\n}\nfor n in 2; do train $n; done',
        {"tensor": 4, "stages": 2},
    ),
    "commands in a here-document": (
        "a.sh",
        f'CMD="cd x;\npython x.py {LAYOUT}"\nsbatch <<EOF\n#!/bin/bash\nsrun -l bash -c "${{CMD}}" '
        "2>&1 | tee a.log\nEOF\n",
        {"tensor": 4, "batch": 64},
    ),
    "files that are written": (
        "a.sh",
        f'cat <<EOT > c.json\n{{"train_batch_size": $GB, "--": 1}}\nEOT\npython x.py {LAYOUT}',
        {"tensor": 4},
    ),
    # Megatron-DeepSpeed: examples_deepspeed/**/*.sh
    "arguments of Megatron-DeepSpeed": (
        "a.sh",
        'O=" \\\n --tensor-model-parallel-size 2 --micro-batch-size 1 --num-experts 1"\n'
        'if [ "true" = "true" ]; then\nO="${O} \\\n  --checkpoint-activations"\nfi\n'
        "deepspeed x.py ${O} --ds-sequence-parallel-size 4 --zero-stage 3 &>> a.log",
        {
            "tensor": 2,
            "context": 4,
            "context_scheme": "ulysses",
            "zero": 3,
            "recompute": "full",
            "sizes": {},
        },
    ),
    # bigscience: experiments/gpt2-meg-ds-3d/*.slurm
    "gradients of float16": (
        "a.sh",
        "P=4\nif [[ $P == 7 ]]; then H=1\nelif [[ $P == 4 ]]; then H=2\nfi\n"
        'export CMD=" --tensor-model-parallel-size $H --global-batch-size $((4*$P)) --fp16"\n'
        "echo $CMD; srun bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee a.log",
        {"tensor": 2, "batch": 16, "dtype": "float16", "reduce": "float16"},
    ),
    # slime: examples/low_precision/run-*.sh
    "arguments of a file that is not there": (
        "a.sh",
        'source "models/qwen3.sh"\nP=(\n  --tensor-model-parallel-size 4\n  # --bf16\n'
        "  --expert-model-parallel-size 16\n)\n"
        "ray job submit -- python3 train.py ${MODEL_ARGS[@]} ${P[@]} --fp16 "
        "--accumulate-allreduce-grads-in-fp32",
        {"tensor": 4, "expert": 16, "dtype": "float16", "reduce": None},
    ),
    # Megatron-LM: tests/functional_tests/test_cases/**/model_config.yaml
    "lists in brackets": (
        "a.yaml",
        "MODEL_ARGS:\n  --micro-batch-size: 1\n  --recompute-granularity: selective\n"
        '  --recompute-modules: "[layernorm moe_act]"\n',
        {"recompute": "selective", "recompute_modules": ("layernorm",)},
    ),
    "fields of NeMo": (
        "a.yaml",
        "MODEL_ARGS:\n  trainer.num_nodes: 2\n  trainer.devices: 8\n"
        "  trainer.strategy.tensor_model_parallel_size: 4\n"
        "  trainer.strategy.sequence_parallel: True\n  model.config.num_layers: 12\n",
        {"tensor": 4, "data": 4, "sequence_parallel": True, "sizes": {"num-layers": 12}},
    ),
    # torchtitan: train_configs/*.toml of 2024 and early 2025
    "degrees in [training]": (
        "a.toml",
        "[training]\nbatch_size = 8\ndata_parallel_degree = -1\ntensor_parallel_degree = 8\n"
        "[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4\n",
        {"tensor": 8, "stages": 2, "data": None, "micro_batch": 2, "lost": ()},
    ),
    "degrees in [parallelism]": (
        "a.toml",
        "[optimizer]\nname = 'Muon'\n[parallelism]\nexpert_parallel_degree = 8\n",
        {"expert": 8, "optimizer": "muon", "lost": ()},
    ),
    # torchtitan: configs/deepseek_16b-8xb200-*.toml
    "parameters in bfloat16": (
        "a.toml",
        '[training]\ndtype = "bfloat16"\nmixed_precision_reduce = "bfloat16"\n'
        "[parallelism]\ndata_parallel_shard_degree = 8\n",
        {"dtype": "bfloat16", "master": "bfloat16", "reduce": "bfloat16", "data": 8, "lost": ()},
    ),
    # LLaMA-Factory: examples/deepspeed/**/*.json
    "types of sums": (
        "a.json",
        '{"bf16": {"enabled": true}, "fp16": {"enabled": false},\n'
        '"data_types": {"grad_accum_dtype": "bf16"}, "zero_optimization": {"stage": 3}}',
        {"dtype": "bfloat16", "reduce": "bfloat16", "zero": 3, "lost": ()},
    ),
    # accelerate: examples/**/*.yaml, tests/test_configs/*.yaml
    "one device": ("a.yaml", "num_processes: 1\ndistributed_type: NO\n", {"data": 1}),
    "replicas": (
        "a.yaml",
        "num_processes: 8\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\n",
        {"data": 8, "zero": 0, "dtype": "float16"},
    ),
    "FSDP of the first version": (
        "a.yaml",
        "num_processes: 8\nnum_machines: 2\ndistributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_activation_checkpointing: true\n",
        {"data": 8, "shards": 4, "zero": 3, "recompute": "full"},
    ),
    "FSDP's strategies by number": (
        "a.yaml",
        "num_processes: 8\ndistributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}\n",
        {"data": 8, "zero": 2},
    ),
    "FSDP of the second version": (
        "a.yaml",
        "num_processes: 8\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\nparallelism_config:\n"
        "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_tp_size: 2\n",
        {"data": 4, "shards": 2, "zero": 2, "tensor": 2, "dtype": "bfloat16"},
    ),
    "DeepSpeed's plugin": (
        "a.yaml",
        "num_processes: 4\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_accumulation_steps: 2\n  offload_optimizer_device: cpu\n",
        {"data": 4, "zero": 3, "micro_batches": 2, "offload": "optimizer"},
    ),
    "Megatron's plugin": (
        "a.yaml",
        "num_processes: 16\ndistributed_type: MEGATRON_LM\nmegatron_lm_config:\n"
        "  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 4\n"
        "  megatron_lm_num_micro_batches: 8\n"
        "  megatron_lm_sequence_parallelism: true\n",
        {"data": 2, "tensor": 2, "stages": 4, "micro_batches": 8, "sequence_parallel": True},
    ),
}
"""Form: the file's name, its text, and what is read."""
ASKED: dict[str, tuple[str, str, str, dict[str, str], dict[str, Any]]] = {
    "variables": (
        "a.sh",
        "x=1\npython x.py \\\n --micro-batch-size 1 --tensor-model-parallel-size ${TP}",
        r"line 3: --tensor-model-parallel-size is \$\{TP\}\. .*give --set TP=VALUE$",
        {"TP": "8"},
        {"tensor": 8},
    ),
    "arguments": (
        "a.sh",
        "python x.py --micro-batch-size 1 --tensor-model-parallel-size $7",
        "--set 7=VALUE",
        {"7": "2"},
        {"tensor": 2},
    ),
    "sums of what a program prints": (
        "a.sh",
        'batch=8\nn=$(nvidia-smi | wc -l)\nO=" --global-batch-size 8 '
        '--micro-batch-size $(( ${batch} / n ))"\npython x.py $O',
        "give --set n=VALUE$",
        {"n": "4"},
        {"micro_batch": 2},
    ),
    "branches on other programs": (
        "a.sh",
        "if nvidia-smi; then\n  TP=8\nelse\n  TP=1\nfi\n"
        "python x.py --micro-batch-size 1 --tensor-model-parallel-size $TP",
        "or to a condition: give --set TP=VALUE",
        {"TP": "1"},
        {"tensor": 1},
    ),
    "templates": (
        "a.json",
        '{"train_batch_size": GBSIZE,\n"zero_optimization": {"stage": ZERO_STAGE}}',
        "not JSON.*give --set GBSIZE=VALUE --set ZERO_STAGE=VALUE$",
        {"GBSIZE": "64", "ZERO_STAGE": "2"},
        {"batch": 64, "zero": 2},
    ),
}
"""Form: the file's name, its text, what is asked for, an answer, and what is read with it."""
REFUSED = {
    "arguments in another script": (
        "a.sh",
        "TP=8\nX='--bf16'\n. `pwd`/CONFIG.sh\nexit 0\n",
        r"no command with arguments of Megatron-LM's is in it; line 3: \. `pwd`/CONFIG.sh is not",
    ),
    "variables for another script": (
        "a.sh",
        'MODEL_ARGS=" \\\n  --num-layers 24"\n',
        "its variables are for another script",
    ),
    "several runs": (
        "a.sh",
        "for tp in 1 2; do\n  python x.py --tensor-model-parallel-size $tp\ndone",
        "starts 2 runs that differ in --tensor-model-parallel-size",
    ),
    "another program's options": ("a.sh", "deepspeed main.py --bf16 --lr 1", "no command with"),
    "layouts in another file": (
        "a.yaml",
        "num_processes: 4\ndistributed_type: DEEPSPEED\n"
        "deepspeed_config: {deepspeed_config_file: ds.json}\n",
        "in DeepSpeed's file ds.json: import that one, with --devices 4",
    ),
    "other clouds": (
        "a.yaml",
        "compute_environment: AMAZON_SAGEMAKER\n",
        "unknown compute_environment 'AMAZON_SAGEMAKER'",
    ),
    "unknown kinds": ("a.yaml", "distributed_type: XLA\n", "unknown distributed_type 'XLA'"),
    "unknown precisions": (
        "a.yaml",
        "num_processes: 2\nmixed_precision: int4\n",
        "unknown mixed_precision 'int4'",
    ),
    "unknown strategies": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 7}\n",
        "unknown fsdp_sharding_strategy '7'",
    ),
    "degrees that do not fit": (
        "a.yaml",
        "num_processes: 6\ndistributed_type: FSDP\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n",
        "for 4 processes, not 6",
    ),
    "micro-batches that do not fit": (
        "a.toml",
        "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 2\n"
        "pipeline_parallel_microbatches = 3\n",
        "not made of micro-batches of equal size",
    ),
    "a script without an end": ("a.sh", "if true; then\n  x --bf16", "line 2: the script ends"),
    "a function that calls itself": ("a.sh", "f() { f --x; }\nf --bf16", "f calls itself"),
    "a script that does not end": (
        "a.sh",
        "while true; do\n  x --bf16\ndone",
        "more than 20000 commands",
    ),
}


def _written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_it_is_meant(form: str, tmp_path: Path) -> None:
    name, text, said = FORMS[form]
    read = read_configuration(_written(tmp_path, name, text))
    assert {key: getattr(read, key) for key in said} == said


@pytest.mark.parametrize("form", ASKED)
def test_what_a_caller_gives_is_asked_for(form: str, tmp_path: Path) -> None:
    name, text, why, given, said = ASKED[form]
    path = _written(tmp_path, name, text)
    with pytest.raises(UsageError, match=re.compile(why, re.DOTALL)):
        read_configuration(path)
    read = read_configuration(path, given=given)
    assert {key: getattr(read, key) for key in said} == said


@pytest.mark.parametrize("form", REFUSED)
def test_a_form_is_refused_with_its_reason(form: str, tmp_path: Path) -> None:
    name, text, why = REFUSED[form]
    with pytest.raises(UsageError, match=why):
        read_configuration(_written(tmp_path, name, text))


def test_given_values_go_before_those_of_the_script(tmp_path: Path) -> None:
    path = _written(tmp_path, "a.sh", "TP=2\nx --tensor-model-parallel-size $TP --bf16")
    assert read_configuration(path).tensor == 2
    assert read_configuration(path, given={"TP": "4"}).tensor == 4


def test_the_command_line_takes_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopar.cli import run

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "convert"))
    path = _written(
        tmp_path, "a.sh", "x --micro-batch-size 2 --tensor-model-parallel-size $1 --bf16"
    )
    model = ["--model", "convert_models:build", "--cluster", "dgx-h100", "--devices", "4"]
    assert run(["import", str(path), *model, "--no-compare", "--set", "1=2"]) == 0
    assert "megatron as data 2 x megatron 2" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--set TP: give NAME=VALUE"):
        run(["import", str(path), *model, "--set", "TP"])


def test_a_file_that_the_script_reads_is_named(tmp_path: Path) -> None:
    text = f'source "models/qwen3.sh"\npython x.py {LAYOUT} ${{MODEL_ARGS[@]}}'
    assert read_configuration(_written(tmp_path, "a.sh", text)).lost == (
        'line 1: source "models/qwen3.sh" is not read, and may set more',
    )
