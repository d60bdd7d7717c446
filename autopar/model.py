"""`LoadedModel` and `TorchModel`.

They hold an imported model on its way from a frontend to the planner and the runtime.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .ir import Graph, Operator

if TYPE_CHECKING:
    from .facts import Facts


CHECKS = "AUTOPAR_CHECKS"
"""The environment variable that leaves out proofs of imports and checks of steps: off."""


def checks_by_default() -> bool:
    """Whether imports are proved and first steps are checked where nothing else is said."""
    return os.environ.get(CHECKS) != "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An assertion of a model's code about numbers of its data, at `place` (file:line).

    `operators`: those that make the tensors which it reads. `holds`: functions of all tensors by
    name, each true where the assertion holds. `checkable`: whether inputs and constants alone
    decide it.
    """

    place: str
    operators: tuple[Operator, ...]
    holds: tuple[Callable[[Mapping[str, Any]], bool], ...]
    checkable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """An imported module: its graph, and how its calls and state map to the graph's tensors.

    `constants`: values of lifted constants. `buffers`, `parameters`: graph name → attribute path in
    the module. `aliases`: further paths of tied parameters → the path that names them. `in_spec`,
    `out_spec`: structures of inputs and outputs. `output_names`: the tensors of the outputs; None
    for numbers and texts, which are in `output_values`, and for those that are `left_out`, which
    the module gives and the graph does not. `checks`: assertions of its code about its
    data. `reads`: the attributes that its code has read in the export, by the submodule's path.
    `facts`: values that it has read elsewhere. `unfolded`: why equal layers were not exported once
    for all of them.
    """

    graph: Graph
    constants: Mapping[str, Any]
    buffers: tuple[str, ...]
    aliases: Mapping[str, str]
    in_spec: Any
    out_spec: Any
    output_names: tuple[str | None, ...]
    output_values: tuple[Any, ...] = ()
    left_out: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    unfolded: str | None = None
    facts: Facts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The import of a model beside its graph, for runs.

    `torch`: the record of a PyTorch model's import. `inputs`: the tensors of the example inputs in
    the graph's order; `call`: the arguments that hold them. `calling`: a context in which a call of
    the module computes what the graph does, without what the export has switched off.
    """

    torch: TorchModel | None = None
    inputs: tuple[Any, ...] | None = None
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    calling: Callable[[Any], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCopies:
    """How a type of models is made small.

    `kind`: its name. `of`: for a graph of the type, functions that make copies with values which
    have every kind of its layers, the smallest first.
    """

    kind: str
    of: Callable[[Graph], Iterator[Callable[[], LoadedModel]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A graph ready to plan, and the source of its weights.

    An ONNX model has `weights`, which reads them one at a time (None if the file holds none). A
    PyTorch model has `module`, which `build` makes when it is first needed, as `imported` does the
    rest of what a run needs. `source`: the graph as imported, without an added loss. `loss`: the
    user's loss function. `notes`: sentences worth telling the user. `dtype`: the floating-point
    type that was asked for; `precision`: the recipe of its products. `given`: the PyTorch module
    before its cast to that type. `reload` imports another such module, with the same inputs (or
    inputs of the shapes that it is given) and options; `at_sizes` one for another call (args,
    kwargs), with typed=False in the types that it has, or an ONNX file at a batch and sizes of
    named dims of at most these two. `file`: an ONNX model, as it was given. `proof`:
    whether the import is to be proved (None: where torch is needed anyway). `small`: small copies
    of a configuration's type, by which it is proved. `values`: of inputs of an ONNX file that are
    constants; `outputs`: its tensors that are given in place of its outputs.
    """

    graph: Graph
    source: Graph
    imported: Callable[[], Imported] = Imported
    loss: Callable[..., Any] | None = None
    weights: Callable[[], Iterator[tuple[str, Any]]] | None = None
    build: Callable[[], Any] | None = None
    notes: tuple[str, ...] = ()
    dtype: str | None = None
    precision: str | None = None
    given: Any = None
    reload: Callable[..., LoadedModel] | None = None
    at_sizes: Callable[..., LoadedModel] | None = None
    file: Any = None
    proof: bool | None = None
    small: SmallCopies | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The module with its weights in the planned floating-point type.

        It is None for an ONNX model.
        """
        return self.build() if self.build is not None else None

    @property
    def torch(self) -> TorchModel | None:
        """The record of a PyTorch model's import."""
        return self.imported().torch

    @property
    def inputs(self) -> tuple[Any, ...] | None:
        """The tensors of the example inputs."""
        return self.imported().inputs

    @property
    def calling(self) -> Callable[[Any], AbstractContextManager[None]]:
        """A context in which the module that it takes computes what the graph does."""
        return self.imported().calling

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the example call."""
        return self.imported().call

    def with_inputs(
        self, inputs: tuple[Any, ...], call: tuple[tuple[Any, ...], dict[str, Any]] | None
    ) -> LoadedModel:
        """The model with other example inputs."""
        imported = replace(self.imported(), inputs=inputs, call=call)
        return replace(self, imported=lambda: imported)
