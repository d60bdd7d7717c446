"""An optimizer with part of its state in the memory of the device's host, as planned.

A step updates parameters with state on the device together, as usual, and the others chunk by chunk
(`state_chunks.py`): the state is copied in, the wrapped optimizer updates these parameters alone,
the state is copied out. On a GPU three streams do this at once: while one chunk is updated, the
next comes in and the one before goes out. On a CPU nothing is copied, since the host's memory is
the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import RunError
from autopar.sharding.state_chunks import chunks

from .closures import Closure, loss_of
from .storage import local_of

Values = list[Tensor]


@runtime_checkable
class HasHostParameters(Protocol):
    """A planned module, as far as its optimizer must know it."""

    def host_parameters(self) -> list[nn.Parameter]:
        """The parameters whose optimizer state the plan has in host memory."""


class Leaving:
    """Copies to the host under way; the copied tensors stay until they are `done`."""

    def __init__(self, done: Any = None, sources: Values | None = None) -> None:
        self.done = done
        self.sources = sources

    def wait(self) -> None:
        """Let the host wait for the copies, and the tensors go."""
        if self.done is not None:
            self.done.synchronize()
        self.sources = None


class Link:
    """The connection of a device and its host; here they share memory, and nothing is copied."""

    def fetch(self, values: Values) -> Any:
        """Begin to bring values to the device; the event of their arrival."""

    def arrive(self, event: Any) -> None:
        """Let the device's work wait for an arrival."""

    def store(self, values: Values) -> Leaving:
        """Begin to bring values to the host, behind the device's work so far."""
        return Leaving()


class CudaLink(Link):
    """Copies on streams of their own, one for each direction, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.incoming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.outgoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, values: Values) -> Any:
        """Begin to copy values in."""
        copies = [torch.empty_like(value, device=self.device) for value in values]
        # The computation's stream owns the copies' memory, and must be done with it.
        self.incoming.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.incoming):
            for value, copy in zip(values, copies, strict=True):
                copy.copy_(value, non_blocking=True)
                # The optimizer holds this tensor object, so the memory behind it is exchanged.
                value.data = copy
        return self.incoming.record_event()

    def arrive(self, event: Any) -> None:
        """Let the computation wait for a copy; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def store(self, values: Values) -> Leaving:
        """The values lie in pinned memory from now on, and are there when the copies have ended."""
        sources = [value.detach() for value in values]
        self.outgoing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outgoing):
            for value in values:
                # Only a copy to pinned memory leaves the host free meanwhile.
                copy = torch.empty_like(value, device="cpu", pin_memory=True)
                copy.copy_(value, non_blocking=True)
                value.data = copy
        return Leaving(self.outgoing.record_event(), sources)


def host_states(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    """`optimizer` over parameters of a planned `module`, with its state where the plan puts it.

    If the plan puts none in host memory, this is the optimizer itself. Training gives the same
    results without this call, with all state on the device. The update of a parameter must depend
    on that parameter alone, as in SGD and Adam.
    """
    if not isinstance(module, HasHostParameters):
        raise RunError(
            "host_states takes a module that autopar.parallelize made, "
            f"not a {type(module).__name__}"
        )
    # Tensors are compared element by element: they are told apart by identity.
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = [parameter for parameter in module.host_parameters() if id(parameter) in own]
    return HostStates(optimizer, held) if held else optimizer


class HostStates(Optimizer):
    """Makes the steps of `inner`, with the state of the parameters `held` in host memory.

    Groups and state are those of `inner`.
    """

    def __init__(self, inner: Optimizer, held: Sequence[Tensor], link: Link | None = None) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.held = tuple(held)
        self._ids = {id(parameter) for parameter in held}
        device = local_of(self.held[0]).device
        self.link = link or (CudaLink(device) if device.type == "cuda" else Link())
        self._share()
        for parameter in self.held:
            self.link.store(self._values([parameter])).wait()

    def _share(self) -> None:
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _values(self, parameters: Sequence[Tensor]) -> Values:
        """The shards of the state of parameters."""
        values = []
        for parameter in parameters:
            for value in self.inner.state.get(parameter, {}).values():
                # Counters of steps, of no dims, stay where the optimizer has them.
                if isinstance(value, Tensor) and value.dim():
                    values.append(value._local_tensor if isinstance(value, DTensor) else value)
        return values

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient; all state is in its place when it returns."""
        loss = loss_of(closure)
        self._update(lambda number: number not in self._ids)
        self._stream([parameter for parameter in self.held if parameter.grad is not None])
        return loss

    def _stream(self, parameters: Sequence[Tensor]) -> None:
        """Update parameters chunk by chunk.

        Meanwhile the next chunk's state comes in and the last one's goes out.
        """
        link = self.link
        leaving = [Leaving(), Leaving()]
        parts = [
            parameters[chunk]
            for chunk in chunks([local_of(parameter).nbytes for parameter in parameters])
        ]
        coming = link.fetch(self._values(parts[0])) if parts else None
        for number, part in enumerate(parts):
            came = coming
            # At most one chunk goes out while the next comes in, so that memory holds three.
            leaving[-2].wait()
            if number + 1 < len(parts):
                coming = link.fetch(self._values(parts[number + 1]))
            link.arrive(came)
            self._update({id(parameter) for parameter in part}.__contains__)
            leaving.append(link.store(self._values(part)))
        for last in leaving[-2:]:
            last.wait()

    def _update(self, wanted: Callable[[int], bool]) -> None:
        """The inner optimizer's step on the parameters whose `id` is `wanted`."""
        whole = [group["params"] for group in self.inner.param_groups]
        try:
            for group in self.inner.param_groups:
                group["params"] = [
                    parameter for parameter in group["params"] if wanted(id(parameter))
                ]
            self.inner.step()
        finally:
            for group, parameters in zip(self.inner.param_groups, whole, strict=True):
                group["params"] = parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the inner optimizer's; state in host memory stays there."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the inner optimizer's; state for host memory does not go by way of the device."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [
            parameter for group in self.inner.param_groups for parameter in group["params"]
        ]
        apart = {
            name: p
            for name, p in zip(names, parameters, strict=False)
            if id(p) in self._ids and name in state_dict["state"]
        }
        rest = {name: value for name, value in state_dict["state"].items() if name not in apart}
        self.inner.load_state_dict({**state_dict, "state": rest})
        self._share()
        for name, parameter in apart.items():
            given = state_dict["state"][name].items()
            self.state[parameter] = {
                key: _cast(value, parameter) if key != "step" else value for key, value in given
            }
            self.link.store(self._values([parameter])).wait()


def _cast(value: Any, parameter: Tensor) -> Any:
    """Floating-point state has its parameter's type, as torch loads it; the tensor is the
    optimizer's own.
    """
    if not isinstance(value, Tensor):
        return value
    return (
        value.detach().clone().to(parameter.dtype if parameter.is_floating_point() else value.dtype)
    )
