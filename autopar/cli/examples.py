"""Examples of every command, as its help shows them."""

from __future__ import annotations

EXAMPLES = {
    "plan": (
        "plan model.onnx --devices 8 --batch 8 --dim sequence=1024 -o plan.json",
        "plan package.module:build --cluster dgx-a100-80g --devices 64 --memory 70GiB",
        'plan model.onnx --devices 64 --scheme "pipeline-1f1b 4 x data 2 x megatron 8"',
        "plan model.onnx --devices 8 --pin 'h.*/mlp/c_fc/MatMul=gpu:n'",
    ),
    "run": (
        "run plan.json --model model.onnx --check",
        "run plan.json --model package.module:build --steps 10 --profile trace.json",
    ),
    "train": ("train gpt.toml --ranks 4", "train gpt.toml --steps 2000 --folder runs/two"),
    "compare": (
        "compare model.onnx --devices 64 --batch 64",
        "compare model.onnx --devices 8 --scheme data --scheme megatron-sp",
        "compare model.onnx --devices 1..64 --cluster dgx-h100 --cluster dgx-a100-80g --price "
        "dgx-h100=2.5 --price dgx-a100-80g=1.2",
    ),
    "explain": (
        "explain plan.json",
        "explain plan.json h.3/mlp/c_fc/MatMul --model model.onnx --alternatives",
        "explain plan.json --model model.onnx --sensitivity",
        "explain plan.json --collectives",
        "explain plan.json --diff other.json",
    ),
    "report": (
        "report plan.json -o report.html",
        "report plan.json other.json -o report.html --model model.onnx",
    ),
    "convert": (
        "convert plan.json --to torchtitan -o parallel.toml",
        "convert plan.json --to dtensor",
    ),
    "import": (
        "import train_config.toml --model hf:config.json --cluster dgx-h100 --devices 64",
        "import arguments.sh --model package.module:build --devices 16 -o plan.json",
    ),
    "what-if": (
        "what-if plan.json --model model.onnx --memory 40GiB",
        "what-if plan.json --model model.onnx --link nvlink=0.5x --pin "
        "'h.*/mlp/c_fc/MatMul=gpu:n' --keep",
    ),
    "verify": (
        "verify package.module:case",
        "verify package.module:build --tp-plan styles.json --nproc 4",
    ),
    "discover": (
        "discover aten.addmm.default --inputs 6,5x7,7x6",
        "discover package.module:function",
    ),
    "calibrate": ("calibrate -o here.json", "calibrate -o here.json --nproc 4 --quick"),
    "doctor": ("doctor", "doctor --report report.json"),
    "bench collectives": (
        "bench collectives --nproc 4 --plot bandwidth.svg",
        "bench collectives --cluster here.json --sizes 1MiB,64MiB",
    ),
    "models": ("models", "models hf:config.json", "models folder/config.json --json"),
    "cluster list": ("cluster list", "cluster list --json"),
    "cluster show": ("cluster show dgx-h100 --devices 64", "cluster show here.json"),
    "cache show": ("cache show", "cache show --json"),
    "cache clear": ("cache clear",),
    "cache": ("cache show", "cache clear"),
    "bench": ("bench collectives --nproc 4",),
    "cluster": ("cluster list", "cluster show dgx-h100"),
    "checkpoint show": ("checkpoint show runs/one", "checkpoint show runs/one --json"),
    "checkpoint convert": (
        "checkpoint convert runs/one -o weights --dtype bfloat16",
        "checkpoint convert weights/model.safetensors -o runs/two --add model.",
    ),
    "completion": (
        "completion bash > autopar.bash",
        "completion zsh > _autopar",
        "completion fish > autopar.fish",
    ),
    "checkpoint": ("checkpoint show runs/one", "checkpoint convert runs/one -o weights"),
}


def examples(name: str) -> str:
    """The last lines of a command's help; `name`: all its words, such as "cluster show"."""
    return "\n".join(["examples:", *(f"  autopar {line}" for line in EXAMPLES[name])])
