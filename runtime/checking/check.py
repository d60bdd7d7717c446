"""The check of a plan on its ranks against one device.

Outputs, losses, gradients and updated weights are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.errors import RunError, unknown
from autopar.ir import Graph
from autopar.runtime.launch import in_steps, run_ranks
from autopar.runtime.local_forms.single_device import mean_square
from autopar.runtime.module.held_shards import Values
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.optimizers import Muon, local_optimizer, muon_groups
from autopar.runtime.parameters.host_states import host_states
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.matrices import MUON, hidden_matrices
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Decision, Program
from autopar.sharding.program_builder import build_program

from .differences import LEARNING_RATES, MOMENTUM, Observation, Report, differences

Loss = Callable[[tuple[Tensor, ...]], Tensor]


def one_device(graph: Graph, gradients: frozenset[str] = frozenset()) -> Program:
    """The program that runs the whole graph on one device."""
    decisions = {
        op.name: Decision(
            options=(), rule=None, inputs=((),) * len(op.inputs), outputs=((),) * len(op.outputs)
        )
        for op in graph.operators
    }
    outputs = dict.fromkeys(
        (*graph.outputs, *((graph.loss,) if graph.loss else ()), *graph.updates.values()), ()
    )
    storage = {tensor.name: () for tensor in graph.parameters}
    assignment = Assignment(
        mesh=Mesh(axes=()),
        decisions=decisions,
        storage=storage,
        outputs=outputs,
        # On one device no value changes its layout.
        chains={},
        gradients=gradients,
    )
    return build_program(graph, assignment)


def observe(
    module: ParallelModule,
    inputs: Sequence[Tensor],
    *,
    optimizer: str = "adamw",
    steps: int = 3,
    seed: int = 0,
    keep: bool = True,
) -> Observation:
    """Run a planned model and gather its outputs, gradients and weights whole.

    Collective: every rank calls it, and only rank 0 holds the gathered values. Without `keep`
    nothing is gathered, and only the losses are returned.
    """
    hold = not dist.is_initialized() or dist.get_rank() == 0
    names = [name for name, _ in module.outputs]
    index = module.loss_index

    def forward() -> tuple[tuple[Tensor, ...], Tensor | None]:
        outputs = module(*inputs)
        return outputs, None if index is None else outputs[index]

    def whole(outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        full = module.full_outputs(outputs)
        return {
            name: value.detach().cpu()
            for i, (name, value) in enumerate(zip(names, full, strict=True))
            if i != index and hold
        }

    def values_of(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # A collective: ranks that throw the values away call it too, or rank 0 would wait.
        gathered = module.full_values(values)
        return gathered if hold else {}

    side = _Side(
        forward=forward,
        whole=whole,
        parameters=module.graph_parameters(),
        full=values_of,
        trains=index is not None,
        make=lambda: planned_optimizer(optimizer, module),
    )
    return _observe(side, optimizer=optimizer, steps=steps, seed=seed, keep=keep)


def observe_model(
    model: nn.Module,
    graph: Graph,
    inputs: Sequence[Tensor],
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    loss: Loss | None = None,
    optimizer: str = "adamw",
    steps: int = 3,
    seed: int = 0,
) -> Observation:
    """Run the original model on one device.

    `loss`: if None, the graph's own loss or the mean square of float outputs. `parameters`: by
    their names in the graph, if the model's own names differ.
    """
    place = graph.outputs.index(graph.loss) if graph.loss in graph.outputs else None

    def forward() -> tuple[tuple[Tensor, ...], Tensor | None]:
        outputs = tuple(leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor))
        if len(outputs) != len(graph.outputs):
            raise RunError(
                f"the model gives {len(outputs)} outputs, its graph has {len(graph.outputs)}"
            )
        if graph.loss is None:
            return outputs, None
        if loss is not None:
            return outputs, loss(outputs)
        if place is not None:
            return outputs, outputs[place]
        squares = [
            mean_square(value, value.numel()) for value in outputs if value.is_floating_point()
        ]
        return outputs, torch.stack(squares).sum()

    def whole(outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {
            name: value.detach().cpu()
            for i, (name, value) in enumerate(zip(graph.outputs, outputs, strict=True))
            if i != place
        }

    known = {tensor.name for tensor in graph.parameters}
    by_name = dict(model.named_parameters()) if parameters is None else parameters
    named = {name: value for name, value in by_name.items() if name in known}
    side = _Side(
        forward=forward,
        whole=whole,
        parameters=named,
        full=lambda values: values,
        trains=graph.loss is not None,
        make=lambda: optimizer_of(optimizer, named, hidden_matrices(graph)),
    )
    return _observe(side, optimizer=optimizer, steps=steps, seed=seed, keep=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of a comparison: the planned module on its ranks, or the original on one device.

    `forward`: its outputs and its loss, if it has one. `whole`: the outputs to compare, by name.
    `full`: the whole values of its parameters or of their gradients. `make`: its optimizer.
    """

    forward: Callable[[], tuple[tuple[Tensor, ...], Tensor | None]]
    whole: Callable[[tuple[Tensor, ...]], dict[str, Tensor]]
    parameters: Mapping[str, nn.Parameter]
    full: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    trains: bool
    make: Callable[[], torch.optim.Optimizer | None]


def _observe(side: _Side, *, optimizer: str, steps: int, seed: int, keep: bool) -> Observation:
    parameters = side.parameters

    def copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values whole, on the CPU, as far as this process holds them."""
        return {name: value.detach().cpu().clone() for name, value in side.full(values).items()}

    torch.manual_seed(seed)
    stepper = side.make()
    outputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    smallest: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    losses: list[float] = []
    # Gradients of the caller's earlier backward passes are no part of the first step.
    _clear(parameters)
    for number in in_steps(max(steps, 1)):
        with torch.set_grad_enabled(side.trains):
            values, loss = side.forward()
        if number == 0 and keep:
            outputs = side.whole(values)
        if loss is None:
            continue
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        # All ranks gather, also one that holds no gradient.
        present = {name: p.grad for name, p in parameters.items() if p.grad is not None and keep}
        of_step = copies(present)
        gradients = gradients or of_step
        for name, gradient in of_step.items():
            size = gradient.abs()
            smallest[name] = torch.minimum(smallest.get(name, size), size)
            largest[name] = torch.maximum(largest.get(name, size), size)
        if stepper is not None:
            stepper.step()
        _clear(parameters)
    # A stage without parameters has no optimizer, but all ranks take part in gathering.
    weights = copies(parameters) if losses and keep and optimizer != "none" else {}
    return Observation(
        outputs=outputs,
        losses=tuple(losses),
        gradients=gradients,
        smallest=smallest,
        largest=largest,
        weights=weights,
    )


def _clear(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        # AdamW decays a weight whose gradient is zero, but leaves out one without a gradient.
        parameter.grad = None


def optimizer_of(
    name: str, parameters: Mapping[str, nn.Parameter], matrices: frozenset[str] = frozenset()
) -> torch.optim.Optimizer | None:
    """The optimizer that a plan names, with the learning rate of the check; None for `none`.

    `parameters`: whole, by name. `matrices`: those of them that are matrices of hidden layers.
    """
    trained = _trained(name, parameters)
    if not trained:
        return None
    if name == MUON:
        return Muon(muon_groups(parameters, matrices), lr=LEARNING_RATES[name])
    kind, options = _of_elements(name)
    return kind(trained, **options)


def _trained(name: str, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that an optimizer updates; an unknown optimizer is an error."""
    if name not in (*LEARNING_RATES, "none"):
        raise RunError(unknown("optimizer", name, sorted((*LEARNING_RATES, "none"))))
    return [value for value in parameters.values() if value.requires_grad and name != "none"]


def _of_elements(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]:
    """The class and the options of an optimizer that updates every element by itself."""
    if name == "adamw":
        return torch.optim.AdamW, {"lr": LEARNING_RATES[name]}
    return torch.optim.SGD, {"lr": LEARNING_RATES[name], "momentum": MOMENTUM}


def planned_optimizer(name: str, module: ParallelModule) -> torch.optim.Optimizer | None:
    """The optimizer that a plan names, over a planned module, with its state where planned.

    Its steps are made on this rank's shards, which takes the host a fraction of those of DTensors.
    """
    trained = _trained(name, module.graph_parameters())
    if not trained:
        return None
    if name == MUON:
        return Muon(module, lr=LEARNING_RATES[name])
    kind, options = _of_elements(name)
    return host_states(local_optimizer(kind, trained, **options), module)


def compare(
    program: Program,
    values: Values,
    inputs: Sequence[Tensor],
    *,
    optimizer: str = "adamw",
    steps: int = 3,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    timeout: float = 600.0,
) -> Report:
    """Run the plan on its ranks and the model on one device, and compare the two.

    Inside a process group of the plan's size this is a collective call; elsewhere it forks Gloo
    ranks. The reference is the original `model` (with parameters named as in the graph; it is
    trained in place), or else the graph on one device.
    """

    def ours() -> Observation:
        groups = DeviceGroups.create(program.assignment.mesh)
        return observe(
            ParallelModule(program, groups, values, options=ModuleOptions(device=device)),
            inputs,
            optimizer=optimizer,
            steps=steps,
            seed=seed,
        )

    def reference() -> Observation:
        if model is not None:
            return observe_model(
                model, program.graph, inputs, loss=loss, optimizer=optimizer, steps=steps, seed=seed
            )
        alone = ParallelModule(
            one_device(program.graph, program.assignment.gradients),
            DeviceGroups.single(),
            values,
            options=ModuleOptions(device=device),
        )
        return observe(alone, inputs, optimizer=optimizer, steps=steps, seed=seed)

    def report(observed: Observation) -> Report:
        return differences(reference(), observed, graph=program.graph, optimizer=optimizer)

    if dist.is_initialized():
        observed = ours()
        answer: list[Any] = [report(observed) if dist.get_rank() == 0 else None]
        # Only rank 0 holds the whole values, but all ranks return the report. NCCL sends from the
        # memory of a GPU alone, so the device is named.
        dist.broadcast_object_list(answer, src=0, device=torch.device(device))
        result: Report = answer[0]
        return result

    def on_rank() -> Observation | None:
        observed = ours()
        return observed if dist.get_rank() == 0 else None

    return report(run_ranks(on_rank, program.assignment.mesh.devices, timeout=timeout)[0])
