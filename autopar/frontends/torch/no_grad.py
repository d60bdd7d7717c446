"""Results of a `no_grad` region of an exported program: values without gradient, or the region's
own inputs.

An operator may give back its own input (`.float()` of float32, `.flatten(1)` of a matrix). Torch's
export then routes later uses of that tensor through the region, in which it was seen last:

    with no_grad(): v = w.flatten(1)        region: v = flatten(w); return v
    y = x @ w                               y = x @ v, and w would have no gradient
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .forms import on_meta, spelled_out

_REGION = "wrap_with_set_grad_enabled"
_IMPLICIT = "CompositeImplicitAutograd"


def give_back_inputs(exported: torch.export.ExportedProgram) -> None:
    """Let what follows a `no_grad` region read the region's inputs themselves where it hands them
    on as they are.
    """
    for part, node in _regions(exported):
        _, held, *arguments = node.args
        assert isinstance(held, torch.fx.Node)
        body = part.get_submodule(str(held.target)).graph
        assert isinstance(body, torch.fx.Graph)
        places = (inner for inner in body.nodes if inner.op == "placeholder")
        outer = dict(zip(places, arguments, strict=True))
        for inner in body.nodes:
            if inner.args and inner.args[0] in outer and _gives_back_its_input(inner):
                outer[inner] = outer[inner.args[0]]
        results = next(inner for inner in body.nodes if inner.op == "output").args[0]
        for taken in list(node.users):
            given = outer.get(results[taken.args[1]])
            if isinstance(given, torch.fx.Node):
                taken.replace_all_uses_with(given)


def detach_regions(exported: torch.export.ExportedProgram) -> None:
    """Detach what `no_grad` regions return: decompositions open the regions and forget them."""
    for part, node in _regions(exported):
        for result in list(node.users):
            readers = list(result.users)
            with part.graph.inserting_after(result):
                detached = part.graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta.update(result.meta)
            for reader in readers:
                reader.replace_input_with(result, detached)
        part.recompile()


def _regions(
    exported: torch.export.ExportedProgram,
) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    """The `no_grad` regions of a program, with the graph that each lies in."""
    for part in exported.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in list(part.graph.nodes):
                if str(node.target) == _REGION and node.args[0] is False:
                    yield part, node


def _gives_back_its_input(node: torch.fx.Node) -> bool:
    """Whether a node's result is its first argument itself, and no view of it."""
    target = node.target
    # Only operators that are written in others may; all others make a tensor or a view.
    if not isinstance(target, torch._ops.OpOverload) or node.meta.get("val") is None:
        return False
    name = ".".join(filter(None, (target._schema.name, target._schema.overload_name)))
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, _IMPLICIT):
        return False
    args, result = on_meta(target, spelled_out(target, target, node))
    return bool(args) and result is args[0]
