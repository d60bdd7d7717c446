"""Refuses plain state that a forward pass writes and reads, and keeps the facts of what it reads.

A program has the values of its export in every call. Where the pass reads state that it has written
itself, the module is exported once more, from the state after the first pass. If it then writes
nothing more of that, and the programs are equal, the state is a cache; all else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelError
from autopar.frontends.torch.caches import on_one_device
from autopar.ir import text_of
from autopar.model import TorchModel

from .own_code import Uses
from .plain_state import Written, has_tensors, is_read
from .recording import Recording, recorded


def with_facts(module: nn.Module, imported: Callable[[], TorchModel]) -> TorchModel:
    """The model that `imported` gives, with the facts that it rests on."""
    # What is put back is from inside: the export's own switching must end after that.
    with on_one_device(module):
        return _with_facts(module, imported)


def _with_facts(module: nn.Module, imported: Callable[[], TorchModel]) -> TorchModel:
    with recorded(module) as recording:
        model = imported()
    uses = recording.uses()
    mine = [written for written in recording.written if is_read(written, uses)]
    clock = recording.clocks(uses)
    if mine or clock:
        _require_cache(module, recording, mine, imported, (model, clock))
    # A cache that is read has its facts, too, and stays as any call would leave it.
    plain = [written for written in mine if not has_tensors(written.after)]
    for written in plain:
        written.put(written.after)
    others = [written for written in recording.written if written not in plain]
    return replace(model, facts=recording.facts(uses, others))


def _require_cache(
    module: nn.Module,
    first: Recording,
    mine: list[Written],
    imported: Callable[[], TorchModel],
    known: tuple[TorchModel, str | None],
) -> None:
    model, clock = known
    exact = True
    try:
        for written in mine:
            exact = exact and not has_tensors(written.after)
            written.put(_stood_in(written.after))
        with recorded(module) as second:
            other = imported()
    finally:
        first.state.restore()
    uses = second.uses()
    still = [written for written in second.written if is_read(written, uses)]
    if not still and not (exact and _differ(model, other)):
        return
    if not mine:
        raise ModelError(
            f"{type(module).__name__} asks for the time, or takes from a generator or an iterator "
            f"({clock}), and a program would have what its export was given in every step: give it "
            "as an argument of the model, or draw by torch"
        )
    raise _refused((still or mine)[0], first.uses())


def _refused(written: Written, uses: Uses) -> ModelError:
    places = [uses.writes.get(str(n)) for n in (written.leaf, written.outer)]
    wrote = next((place for place in places if place), "")
    reads = [uses.loads.get(str(n)) for n in (written.leaf, written.outer)]
    read = next((place for place in reads if place), "")
    return ModelError(
        f"the forward pass writes {written.words}{wrote and f' ({wrote})'} and reads it"
        f"{read and f' ({read})'}: a program would have the value of its export in every call. "
        "Make it a buffer (register_buffer, and change it by torch's operators), or an argument of "
        "the model, or set it once before autopar.plan"
    )


def _stood_in(value: Any) -> Any:
    """A value with numbers for the tensors of an export in it."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), value
    )


def _differ(model: TorchModel, other: TorchModel) -> bool:
    """Whether two programs are other ones, or have other constants."""
    if text_of(model.graph) != text_of(other.graph):
        return True
    return not _alike(model.constants, other.constants)


def _alike(ones: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return ones.keys() == others.keys() and all(
        one is others[name] or (one.shape == others[name].shape and torch.equal(one, others[name]))
        for name, one in ones.items()
    )
