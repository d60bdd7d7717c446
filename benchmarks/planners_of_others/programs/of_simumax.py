"""SimuMax's search: MODEL DEVICES BATCH.

Micro-batches of one sample, no recomputation, tensor degrees up to 8, any pipeline degree.
"""

import contextlib
import io
import sys

sys.path.insert(0, ".")
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM

model = sys.argv[1]
devices = int(sys.argv[2])
strategy = StrategyConfig.read_json_file("configs/strategy/tp1_pp2_dp4_mbs1.json")
strategy.update(
    enable_recompute=False, recompute_granularity=None, recompute_layer_num=0, world_size=devices
)
planner = PerfLLM()
planner.configure(
    strategy_config=StrategyConfig.init_from_dict(strategy),
    model_config=ModelConfig.init_from_config_file(f"configs/models/{model}.json"),
    system_config=SystemConfig.init_from_config_file("configs/system/b200_bf16_ceperm.json"),
)
with contextlib.redirect_stdout(io.StringIO()):
    best = planner.search_best_parallel_strategy(
        world_size=devices,
        gmi_error=6,
        micro_batch_size=1,
        global_batch_size=int(sys.argv[3]),
        all_search_result={},
        verbose=False,
    )
print("STEP", best["iter_time"].split()[0])
