"""autoparallel's search over its own example models: MODEL LAYERS MESH SOLVER.

The mesh is of CPUs, with a process group of nobody (`fake`), as the examples have. They ask a GPU
for its name, and hear H100. The attention that torch has for CPUs has no rule in DTensor,
and so would be replicated; it gets the splits of the one for GPUs, by samples and by heads. Torch
counts integers on GPUs alone (`histc`): here they are counted as floats.
"""

import math
import sys
import types
from collections.abc import Callable
from typing import Any

sys.path.insert(0, ".")
import torch
from autoparallel.api import AutoParallel
from autoparallel.cost_models.collective_runtime_estimation import set_nccl_topo_config
from autoparallel.cost_models.nccl_cost_model import detect_nccl_topo_config
from llama_of_autoparallel import LLAMA
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    register_op_strategy,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

MICROSECOND = 1e-6


def split_attention_of_cpus() -> None:
    """Give torch's attention for CPUs the splits of its attention for GPUs."""
    aten = torch.ops.aten
    for operator, outputs in (
        (aten._scaled_dot_product_flash_attention_for_cpu.default, 2),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, 3),
    ):

        @register_op_strategy(operator)
        def strategy(schema: Any, outputs: int = outputs) -> Any:
            inputs = sum(isinstance(argument, OpStrategy) for argument in schema.args_schema)
            placements = (Replicate(), Shard(0), Shard(1))
            return expand_to_full_mesh_op_strategy(
                schema.get_mesh_from_args(),
                schema,
                [[placement] * (outputs + inputs) for placement in placements],
                input_index=outputs,
            )


def llama(layers: int, mesh: DeviceMesh) -> tuple[Any, Callable[[], Any], dict[str, Any]]:
    """`examples/example_llama3.py`: Llama-3-8B of that many layers."""
    from autoparallel._testing.models.llama3 import Transformer, TransformerModelArgs, apply_ac

    arguments = TransformerModelArgs(n_layers=layers, **LLAMA)
    with torch.device("meta"):
        model = Transformer(arguments)
    apply_ac(model, mode="selective", selective_ac_option="op")
    shape = (2 * mesh.shape[0], 8192)
    return model, lambda: torch.randint(0, 128256, shape), {"repeated_subgraphs": True}


def deepseek(layers: int, mesh: DeviceMesh) -> tuple[Any, Callable[[], Any], dict[str, Any]]:
    """`examples/example_ds3_local_map.py`: the small DeepSeek-V3, with 64 experts a layer."""
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function
    triton.language = types.ModuleType("triton.language")
    triton.language.constexpr = int
    sys.modules |= {"triton": triton, "triton.language": triton.language}
    counted = torch.histc
    torch.histc = lambda values, **bins: counted(values.float(), **bins).to(values.dtype)
    from autoparallel._testing.models.dsv3 import DeepSeekV3Model, make_dsv3_config

    config = make_dsv3_config(num_experts=64, max_seq_len=2048, n_layers=layers)
    with torch.device("meta"):
        model = DeepSeekV3Model(config, mesh=mesh, compute_dtype=torch.bfloat16)
    shape = (8 * mesh.size(), 2048)
    return model, lambda: torch.randint(0, config.vocab_size, shape), {"dynamic": True}


def main() -> None:
    """Search, and print the objective, which autoparallel has in microseconds."""
    torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
    torch.cpu.get_device_name = torch.cuda.get_device_name
    name = sys.argv[1]
    layers = int(sys.argv[2])
    sizes = tuple(map(int, sys.argv[3].split("x")))
    solver = sys.argv[4]
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=math.prod(sizes)
    )
    axes = ("dp", "ep") if name == "deepseek" else ("dp", "tp", "cp")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    split_attention_of_cpus()
    set_nccl_topo_config(detect_nccl_topo_config(mesh))
    model, inputs, options = {"llama": llama, "deepseek": deepseek}[name](layers, mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chosen = {} if solver == "ilp" else {"solver": solver}
    with AutoParallel(model, inputs, mesh, policy, **options, **chosen) as planner:
        planner.add_parameter_memory_constraint(low=None, high=None)
        split = (Shard(0),) * 2 if name == "deepseek" else (Shard(0), Replicate(), Replicate())
        entry = split[: mesh.ndim]
        leave = (Shard(0), Shard(2)) if name == "llama" and mesh.ndim == 2 else entry
        planner.add_input_constraints([entry])
        planner.add_output_constraints([leave])
        planner.optimize_placement(verbose=False)
        print("STEP", objective(planner.sharding_optimizer) * MICROSECOND)


def objective(optimizer: Any) -> float:
    """Microseconds of the solution."""
    if "approximate" in getattr(optimizer, "profile", {}):
        return float(optimizer.profile["approximate"]["objective"])
    return float(optimizer.prob.objective.value())


if __name__ == "__main__":
    main()
