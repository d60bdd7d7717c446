"""hyper-parallel's ND search (fast-tuner) for its example of DeepSeek-V3 on 512 devices.

Only its first phase: the others run the candidates on devices, which is where its steps come from.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

root = Path.cwd() / "hyper_parallel" / "auto_parallel" / "fast-tuner"
sys.path.insert(0, str(root))
example = root / "config" / "example" / "mcore" / "pretrain_deepseek3_671b_4k_A3_ptd.sh"
degrees = dict.fromkeys(("DP", "TP", "PP", "EP", "FSDP"), True)
with tempfile.TemporaryDirectory() as folder:
    asked = {
        "shell_path": str(example),
        "mindspeed_path": "pretrain_gpt.py",
        "dataset": "data",
        "rank_num": 512,
        "gbs": 3840,
        "alg_phase": 1,
        "output_path": folder,
        "strategy": degrees | {"CP": False},
    }
    options = Path(folder, "options.json")
    options.write_text(json.dumps(asked), encoding="utf-8")
    sys.argv = ["fast-tuner-parallel", "--config", str(options)]
    runpy.run_module("fast_tuner.parallel_tool", run_name="__main__")
