"""The reference of a check: the same steps of the original model on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.recipes import recipe_in
from autopar.model import LoadedModel
from autopar.order.execution import execution
from autopar.plan import Plan
from autopar.runtime.local_forms.randomness import is_random
from autopar.runtime.models.model_values import model_values
from autopar.runtime.models.onnx_module import OnnxModule
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import Schedule

from .check import observe, observe_model, one_device
from .differences import Observation, nudged
from .masters import mastered


def exact(model: LoadedModel, plan: Plan) -> bool:
    """Whether a plan can draw like torch's own generator on one device.

    It cannot if stages draw, each its own part.
    """
    return not plan.stages or not is_random(model.graph)


def reference_observation(
    model: LoadedModel,
    plan: Plan,
    inputs: Sequence[Tensor],
    *,
    steps: int,
    seed: int,
    nudge: bool = False,
) -> Observation:
    """Outputs, gradients and weights of the original module on one device.

    An ONNX model is run as `OnnxModule`, the converted one, whose weights may be `nudged`.
    Where the plan stores parameters in another type, they are in that type here, too, and cast for
    every call.
    """
    if not exact(model, plan) or recipe_in(model.graph) is not None:
        # Only a planned module draws by counter and rounds products by a recipe, as the plan does:
        # one on a single device.
        counting = _alone(model, plan)
        return observe(counting, inputs, optimizer=plan.model.optimizer, steps=steps, seed=seed)
    if model.torch is not None:
        alone: nn.Module = Original(model, model.module, model.call, planned=True)
        names = dict(model.module.named_parameters())
    else:
        values = model_values(model)
        read = ((n, v if isinstance(v, Tensor) else v()) for n, v in values.items())
        pairs = ((name, nudged(value) if nudge else value) for name, value in read)
        alone = OnnxModule(model.source, pairs)
        names = {
            name: value
            for name, value in alone.named_tensors().items()
            if isinstance(value, nn.Parameter)
        }
    types = plan.schedule.types
    stored = model_values(model, types) if types.master else {}
    cast = [tensor.name for tensor in model.graph.parameters if types.casts(tensor)]
    masters: dict[str, Tensor] = {}
    for name in cast:
        value = stored[name]
        masters[name] = value if isinstance(value, Tensor) else value()
    alone, names = mastered(alone, names, masters)
    return observe_model(
        alone,
        model.graph,
        inputs,
        parameters=names,
        optimizer=plan.model.optimizer,
        steps=steps,
        seed=seed,
    )


def _alone(model: LoadedModel, plan: Plan) -> ParallelModule:
    """The planned module on one device.

    A largest element is that of a micro-batch, so one with recipes runs in those of the plan.
    """
    analysis = analyse(model.graph, train=plan.model.mode == "train")
    program = one_device(model.graph, analysis.gradients)
    types = plan.schedule.types
    if recipe_in(model.graph) is None:
        return ParallelModule(program, DeviceGroups.single(), model_values(model))
    schedule = Schedule(micro_batches=plan.schedule.micro_batches, types=types)
    return ParallelModule(
        execution(program.assignment, analysis, schedule),
        DeviceGroups.single(),
        model_values(model, types),
        options=ModuleOptions(exact_random=exact(model, plan)),
    )


class Original(nn.Module):
    """The original module called as in its example, its loss behind its outputs.

    `call`: the arguments of the example (None: the inputs are those of the graph). `planned`: gives
    None for outputs that the graph leaves out.
    """

    def __init__(
        self, model: LoadedModel, module: nn.Module, call: Any, *, planned: bool = False
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._calling = model.calling
        self._loss = model.loss
        told = model.torch if planned and model.torch is not None and model.torch.left_out else None
        self._names = () if told is None else told.output_names

    def forward(self, *inputs: Tensor) -> Any:
        """The outputs; with a loss function, (outputs, loss)."""
        args, kwargs = self._call if self._call is not None else (inputs, {})
        with self._calling(self.module):
            outputs = self.module(*args, **kwargs)
        if self._loss is None:
            return self._told(outputs) if self._names else outputs
        return outputs, self._loss(outputs, *args, **kwargs)

    def _told(self, outputs: Any) -> Any:
        """The outputs, with None for those that the graph leaves out."""
        leaves, structure = pytree.tree_flatten(outputs)
        if len(leaves) != len(self._names):
            return outputs
        told = (
            None if name is None and isinstance(leaf, Tensor) else leaf
            for name, leaf in zip(self._names, leaves, strict=True)
        )
        return pytree.tree_unflatten(told, structure)
