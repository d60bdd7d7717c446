"""`torch.compile` of a planned module's segments: its work between the collectives of its units.

The order of a step, the units and autograd's node stay uncompiled Python, whatever a caller
compiles around them. A segment is compiled whole, with the collectives inside its layers. Two kinds
stay uncompiled: segments with random numbers other than dropout's counted masks, since a compiled
graph would draw others, and stages that make gradients of weights later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from autopar.runtime.local_forms.dropout import dropout
from autopar.runtime.local_forms.randomness import is_drawing
from autopar.runtime.lowering import LocalProgram, LocalSegment

from .engine import Engine


def compile_engine(engine: Engine, options: Mapping[str, Any]) -> None:
    """Compile the segments of all stages that this rank holds."""
    for stage in engine.stages.values():
        if not stage.late:
            stage.run_as(functools.partial(compiled, options=options, exact=engine.exact))


def compiled(program: LocalProgram, *, options: Mapping[str, Any], exact: bool) -> LocalProgram:
    """The program, its segments compiled where results stay the same.

    `exact`: random numbers come from torch's generator.
    """
    segments = [_segment(segment, options, exact=exact) for segment in program.segments]
    return replace(program, segments=tuple(segments))


def _segment(segment: LocalSegment, options: Mapping[str, Any], *, exact: bool) -> LocalSegment:
    # A segment may have been compiled before, with other options.
    module: fx.GraphModule = getattr(segment.module, "_orig_mod", segment.module)
    drawing = [
        node.target
        for node in module.graph.nodes
        if node.op == "call_function" and is_drawing(node.target)
    ]
    if any(exact or target is not dropout for target in drawing):
        return segment
    return replace(segment, module=cast(fx.GraphModule, torch.compile(module, **options)))
