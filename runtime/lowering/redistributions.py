"""Redistributions in a segment's graph: a chain of steps, the first of which may run meanwhile.

A value departs where its redistribution stands in the program, and arrives where it is first used:
what is computed in between hides the first collective of the chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from autopar.ir import Graph, Tensor
from autopar.runtime.redistribution.steps import Chain, arrive, depart, step, step_actions
from autopar.sharding.layout import Layout, format_layout
from autopar.sharding.program import Redistribute, departure
from autopar.sharding.redistribution import changed_axes

from .draft import Coming, Draft
from .frame import Frame
from .program import Place, identifier


class Transit:
    """Writes the steps of redistributions into drafts of segments."""

    def __init__(self, frame: Frame, model: Graph) -> None:
        self.frame = frame
        self.model = model

    def chain(self, layouts: Sequence[Layout]) -> Chain:
        """The actions of a redistribution: those ahead, those back, and the group of each step."""
        frame = self.frame
        return tuple(
            (*step_actions(before, after, frame.mesh), frame.over(changed_axes(before, after)))
            for before, after in itertools.pairwise(layouts)
        )

    def begin(self, draft: Draft, item: Redistribute, value: fx.Node) -> Place:
        """Write the steps of a chain up to its first collective, which departs; its place."""
        frame = self.frame
        places = [frame.place(item.tensor, layout) for layout in item.chain]
        coming = Coming(value, item, self.chain([layout for _, layout in places]))
        # A chain without a collective does not depart: its steps run at once.
        first = departure(item, frame.program.assignment.mesh.shape)
        coming = self._steps(draft, coming, 0, len(coming.chain) if first is None else first)
        if first is None:
            draft.nodes[places[-1]] = coming.node
        else:
            node = self._step(draft, coming, first, depart)
            draft.coming[places[-1]] = coming._replace(node=node, number=first)
        return places[-1]

    def arrive(self, draft: Draft, place: Place) -> None:
        """Wait for the value on its way to a place, and write the remaining steps."""
        coming = draft.coming.pop(place)
        coming = coming._replace(node=self._step(draft, coming, coming.number, arrive))
        coming = self._steps(draft, coming, coming.number + 1, len(coming.chain))
        draft.nodes[place] = coming.node

    def _steps(self, draft: Draft, coming: Coming, first: int, end: int) -> Coming:
        """Write the steps of a chain from `first` to before `end`, a node each."""
        for number in range(first, end):
            coming = coming._replace(node=self._step(draft, coming, number, step))
        return coming

    def _step(
        self, draft: Draft, coming: Coming, number: int, function: Callable[..., object]
    ) -> fx.Node:
        """A node for one step of a chain."""
        item = coming.item
        ahead, back, group = coming.chain[number]
        changed = changed_axes(*item.chain[number : number + 2])
        axes = "_".join(self.frame.axes[axis].name for axis in changed)
        if function is depart:
            action = "leaves"
        elif ahead.name == "nothing":
            # Nothing moves forward, while the gradient does: the rank's value becomes its share.
            action = "share"
        else:
            action = ahead.name
        node = draft.graph.create_node(
            "call_function",
            function,
            # A value without a gradient has no step back, and keeps no graph alive.
            (coming.node, ahead, back if item.differentiable else None, group),
            name=f"{identifier(item.tensor)}_{action}_{axes}",
        )
        # A value that departs is a handle of the collective, not yet a tensor.
        if function is not depart:
            node.meta["tensor"] = describe(self.model.tensors[item.tensor], item.chain[number + 1])
        return node


def describe(tensor: Tensor, layout: Layout) -> str:
    """The dtype, shape and layout of a value, for readers of a program's graph."""
    return f"{tensor.dtype}{list(tensor.shape)} [{format_layout(layout)}]"
