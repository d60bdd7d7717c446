"""Trees of pointwise operators as one operator, which keeps its inputs and not what lies between.

    silu(x) y       keeps x and y instead of x, y and silu(x)

A tree is made where autograd would keep more of its values than it has inputs: the backward pass
makes them again (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.ir import Operator, Ref, Role, Value
from autopar.ir.bodies import POINTWISE, Body

from .spelling import Spelling, beside, word

KEEPS_INPUTS = frozenset(
    {"mul", "div", "pow", "square", "silu", "gelu", "softplus", "abs", "log", "sin", "cos"}
)
KEEPS_RESULT = frozenset({"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal"})
KEEPS_NOTHING = frozenset({"add", "sub", "rsub", "neg", "to", "_to_copy"})
"""What autograd keeps of the operators that trees are made of."""
ACTIVATIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh"})
_WORDS = KEEPS_INPUTS | KEEPS_RESULT | KEEPS_NOTHING
MOST = 32
"""The most operators of a tree."""


class Trees:
    """The trees of a graph: `instead`, by the name of what each makes."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.instead: dict[str, Operator] = {}
        inside: set[str] = set()
        for operator in reversed(spelling.graph.operators):
            if operator.outputs[0] in inside or not self._is_pointwise(operator):
                continue
            members = self._members(operator)
            if self._saves(members):
                inside.update(members)
                self.instead[operator.outputs[0]] = self._tree(operator, members)

    def _is_pointwise(self, operator: Operator) -> bool:
        ends = (*operator.inputs, *operator.outputs)
        return (
            word(operator) in _WORDS
            and operator.kind.startswith("aten.")
            and self.spelling.learned.issuperset(operator.outputs)
            and all(self.spelling.dtype(name).startswith(("float", "bfloat")) for name in ends)
        )

    def _members(self, root: Operator) -> dict[str, Operator]:
        """The operators of a tree by what they make, the last one first."""
        members = {root.outputs[0]: root}
        # Grows while it is walked.
        for operator in (queue := [root]):
            for name in operator.inputs:
                inner = self.spelling.makers.get(name)
                if inner is not None and len(queue) < MOST and self._is_inside(operator, name):
                    members[name] = inner
                    queue.append(inner)
        return members

    def _is_inside(self, operator: Operator, name: str) -> bool:
        """Whether a value is made by a pointwise operator, for one use of another one alone."""
        spelling = self.spelling
        return (
            self._is_pointwise(spelling.makers[name])
            and spelling.reader(name) is not None
            and operator.inputs.count(name) == 1
            and spelling.shape(name) == spelling.shape(operator.outputs[0])
        )

    def _saves(self, members: Mapping[str, Operator]) -> bool:
        """Whether less is kept of the inputs of a tree than of its operators."""
        saved = {name for member in members.values() for name in self._saved(member)}
        read = {name for member in members.values() for name in member.inputs}
        more = self._bytes(saved.intersection(members))
        return len(members) > 1 and more > self._bytes(read - members.keys() - saved)

    def _saved(self, operator: Operator) -> tuple[str, ...]:
        """The tensors that autograd keeps of an operator."""
        said = word(operator)
        if said in ("mul", "div"):
            # Each side is kept for the gradient of the other.
            pairs = self.spelling.pairs(operator)
            return tuple(one for one, other in pairs if other in self.spelling.learned)
        if said in KEEPS_RESULT:
            return operator.outputs
        return operator.inputs if said in KEEPS_INPUTS else ()

    def _bytes(self, names: Iterable[str]) -> int:
        tensors = (self.spelling.tensors[name] for name in names)
        return sum(t.own_bytes for t in tensors if t.role is Role.ACTIVATION)

    def _tree(self, root: Operator, members: Mapping[str, Operator]) -> Operator:
        inputs: dict[str, int] = {}
        words = {word(member) for member in members.values()}
        body = _body(root, members, inputs)
        gated = word(root) == "mul" and not ACTIVATIONS.isdisjoint(words)
        return Operator(
            name=beside(root, "gated_activation" if gated else "pointwise"),
            kind=POINTWISE,
            inputs=tuple(inputs),
            outputs=root.outputs,
            attributes={"body": body},
        )


def _body(operator: Operator, members: Mapping[str, Operator], inputs: dict[str, int]) -> Body:
    """The expression of an operator; adds the tensors that it reads to `inputs`."""

    def told(value: Value) -> Value:
        if not isinstance(value, Ref):
            return value
        name = operator.inputs[value.index]
        if name in members:
            return _body(members[name], members, inputs)
        return Ref(inputs.setdefault(name, len(inputs)))

    def place(given: tuple[str, Value]) -> int:
        return given[1].index if isinstance(given[1], Ref) else -1

    # Rules count the tensors of an operator by their places.
    given = sorted(operator.attributes.items(), key=place)
    return operator.kind, tuple((formal, told(value)) for formal, value in given)
