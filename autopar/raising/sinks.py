"""Sinks of attention: scores of each head beside those of its keys, which take up some weight.

    softmax((scores, sink))[..., :keys],   which may begin with - max(scores, sink)

Source: OpenAI, gpt-oss model card (arXiv:2508.10925); G. Xiao et al., arXiv:2309.17453.
"""

from __future__ import annotations

from autopar.ir import Operator

from .spelling import Spelling


def beside_sinks(weights: str, spelling: Spelling) -> tuple[Operator, str, str] | None:
    """The softmax of which the weights [batch, heads, queries, keys] are all but those of sinks.

    Also the scores before it, and the sinks [heads].
    """
    cut = spelling.maker(weights, "slice")
    if cut is None:
        return None
    softmax = spelling.maker(spelling.uncast(cut.inputs[0]), "softmax", "_softmax")
    if softmax is None:
        return None
    join = spelling.maker(_unshifted(spelling.uncast(softmax.inputs[0]), spelling), "cat")
    if join is None or len(join.inputs) != 2:
        return None
    scores, column = join.inputs
    dims = {one.attributes.get("dim") for one in (cut, join)}
    first = cut.attributes.get("start") in (None, 0)
    if not first or not dims <= {-1, 3} or spelling.shape(scores) != spelling.shape(weights):
        return None
    sinks = _of_heads(column, spelling)
    return None if sinks is None else (softmax, scores, sinks)


def _unshifted(name: str, spelling: Spelling) -> str:
    """The scores from which the greatest of each row was taken away."""
    less = spelling.maker(name, "sub")
    if less is None or len(less.inputs) != 2 or less.attributes.get("alpha", 1) != 1:
        return name
    scores = spelling.uncast(less.inputs[0])
    most = spelling.maker(spelling.uncast(less.inputs[1]), "max", "amax")
    same = most is not None and spelling.uncast(most.inputs[0]) == scores
    row = spelling.shape(less.inputs[1]) == (*spelling.shape(scores)[:-1], 1)
    return scores if same and row else name


def _of_heads(column: str, spelling: Spelling) -> str | None:
    """The numbers [heads] that are read as scores [batch, heads, queries, 1]."""
    name = spelling.uncast(column)
    heads = spelling.shape(name)[1]
    spread = spelling.maker(name, "expand", "repeat")
    if spread is not None:
        name = spelling.uncast(spread.inputs[0])
    if spelling.shape(name) != (1, heads, 1, 1):
        return None
    while spelling.shape(name) != (heads,):
        apart = spelling.maker(name, "reshape", "view", "unsqueeze")
        if apart is None:
            return None
        name = spelling.uncast(apart.inputs[0])
    return name
