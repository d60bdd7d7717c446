"""`torch.compile` of what a planned module runs between the collectives of its units: each segment of a program by itself.

The order of a step, the units and autograd's node stay Python that runs as it is, whatever a caller compiles around them. A segment is
compiled whole, collectives within its layers included. One that draws random numbers in another way than dropout's counted masks is left
as it is, since a compiled graph would draw others; and so are stages that make the gradients of weights later than those of inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from .engine import Engine
from .local_forms.dropout import dropout
from .local_forms.randomness import is_drawing
from .lowering import LocalProgram, LocalSegment


def compile_engine(engine: Engine, options: Mapping[str, Any]) -> None:
    """Compile the segments of all stages that this rank holds."""
    for stage in engine.stages.values():
        if not stage.late:
            stage.run_as(functools.partial(compiled, options=options, exact=engine.exact))


def compiled(program: LocalProgram, *, options: Mapping[str, Any], exact: bool) -> LocalProgram:
    """The program with its segments compiled, as far as that leaves what they compute; `exact`: they draw from torch's generator."""
    return replace(program, segments=tuple(_segment(segment, options, exact=exact) for segment in program.segments))


def _segment(segment: LocalSegment, options: Mapping[str, Any], *, exact: bool) -> LocalSegment:
    module: fx.GraphModule = getattr(segment.module, "_orig_mod", segment.module)  # of what is compiled already
    drawing = [node.target for node in module.graph.nodes if node.op == "call_function" and is_drawing(node.target)]
    if any(exact or target is not dropout for target in drawing):
        return segment
    return replace(segment, module=cast(fx.GraphModule, torch.compile(module, **options)))
