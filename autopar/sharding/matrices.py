"""The matrices of a model's hidden layers, which optimizers of matrices (Muon) update whole.

A matrix is a trained weight [m, n] of a product. A weight [experts, m, n] is a batch of them. Left
to AdamW are norms, biases and convolutions, tables whose rows are looked up (embeddings), and
heads: weights behind which there is neither another product with a weight nor a sum with another
branch of the model (K. Jordan, https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir import Graph, Operator, Role

from .rules import RULES

DIMS = (2, 3)
"""Dims of a matrix, and of a batch of them."""
SUMS = frozenset(("aten.add.Tensor", "aten.add_.Tensor"))
"""Operators that join the branches of a residual network."""
LOOKUPS = ("embedding", "Gather", "index")
"""Parts of the names of operators that take rows out of a table."""


MUON = "muon"
"""The optimizer of matrices, by its name in plans."""


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """The names of the parameters that are matrices of hidden layers, or batches of them.

    They are those that are trained if the model is.
    """
    return frozenset(_Weights(graph).hidden())


class _Weights:
    """The weights of a graph's products, with the tensors that carry them and their results."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers = graph.consumers()
        self.carried = self._carried()

    def hidden(self) -> Iterator[str]:
        """The matrices that are no tables and no heads."""
        ends = self._ends()
        for tensor in self.graph.parameters:
            if not (tensor.trainable and tensor.is_float and len(tensor.shape) in DIMS):
                continue
            readers = list(self._readers(tensor.name))
            products = [operator for operator in readers if _is_product(operator)]
            is_table = any(map(_looks_up, readers))
            if not is_table and any(operator.name not in ends for operator in products):
                yield tensor.name

    def _carried(self) -> Mapping[str, str]:
        """The parameter that each tensor is, cast, transposed or viewed; for those that are one."""
        carried = {tensor.name: tensor.name for tensor in self.graph.parameters}
        for operator in self.graph.operators:
            if len(operator.inputs) != 1 or _looks_up(operator):
                continue
            if source := carried.get(operator.inputs[0]):
                carried.update(dict.fromkeys(operator.outputs, source))
        return carried

    def _readers(self, name: str) -> Iterator[Operator]:
        """The operators that read a parameter with something else."""
        names = [name, *(other for other, source in self.carried.items() if source == name)]
        for carrier in dict.fromkeys(names):
            for index, _ in self.readers.get(carrier, ()):
                operator = self.graph.operators[index]
                if operator.outputs[0] not in self.carried:
                    yield operator

    def _ends(self) -> frozenset[str]:
        """The products with a weight behind which no other one and no sum of branches follows."""
        ends: set[str] = set()
        followed: set[str] = set()  # tensors behind which something follows
        for operator in reversed(self.graph.operators):
            weighs = _is_product(operator) and any(n in self.carried for n in operator.inputs)
            later = any(name in followed for name in operator.outputs)
            if weighs and not later:
                ends.add(operator.name)
            if later or weighs or self._joins(operator):
                followed.update(operator.inputs)
        return frozenset(ends)

    def _joins(self, operator: Operator) -> bool:
        """Whether an operator adds branches of the model, each with dims of its own."""
        tensors = [self.graph.tensors[name] for name in operator.inputs]
        made = [t for t in tensors if t.role is Role.ACTIVATION and t.name not in self.carried]
        return operator.kind in SUMS and len([t for t in made if len(t.shape) > 1]) > 1


def _is_product(operator: Operator) -> bool:
    # The weight of a convolution [out, in, place] is no batch of matrices.
    is_filter = "conv" in operator.kind.lower()
    return not is_filter and operator.kind in RULES and bool(RULES[operator.kind].products)


def _looks_up(operator: Operator) -> bool:
    return any(part in operator.kind for part in LOOKUPS)
