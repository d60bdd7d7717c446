"""A convolution that pads both ends, and of which the rows after the input's are cut off, as the
causal one that it is: its rows can then be split.
"""

from __future__ import annotations

from autopar.ir import Operator, Value

from .spelling import Spelling, word


def causal_convolution(operator: Operator, spelling: Spelling) -> Operator | None:
    """The convolution of which an operator takes the first rows, those of its input."""
    given = operator.attributes
    made = operator.inputs[0] if word(operator) == "slice" else ""
    conv = spelling.maker(made, "conv1d")
    if conv is None or spelling.reader(made) is not operator:
        return None
    rank = len(spelling.shape(made))
    dim = given.get("dim", 0)
    first = given.get("start") in (None, 0) and given.get("step", 1) == 1
    if not first or not isinstance(dim, int) or dim % rank != rank - 1:
        return None
    reach = (spelling.shape(conv.inputs[1])[-1] - 1) * _number(conv.attributes.get("dilation"), 1)
    padded = reach > 0 and _number(conv.attributes.get("padding"), 0) == reach
    alone = _number(conv.attributes.get("stride"), 1) == 1
    rows = spelling.shape(conv.inputs[0])[-1] == spelling.shape(operator.outputs[0])[-1]
    if not (padded and alone and rows):
        return None
    return Operator(
        name=conv.name,
        kind="autopar.causal_conv1d",
        inputs=conv.inputs,
        outputs=operator.outputs,
        attributes={key: value for key, value in conv.attributes.items() if key != "padding"},
    )


def _number(value: Value, default: int) -> int:
    """The one size of a window along one dim."""
    if isinstance(value, tuple):
        (value,) = value
    return value if isinstance(value, int) else default
