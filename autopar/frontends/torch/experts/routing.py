"""Finds the parts of a layer of experts in a graph.

Grouped products, biases by expert, sorting of tokens by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph, Operator, Ref

PRODUCTS: Mapping[str, tuple[str, str, str]] = {
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
}
_CASTS = frozenset(
    {"aten.to.dtype", "aten._to_copy.default", "aten.alias.default", "aten.contiguous.default"}
)
_LOOK_UPS = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor"})
_BY_ROW = frozenset({"aten.mul.Tensor", "aten.to.dtype", "aten._to_copy.default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A grouped product [rows, k] by [experts, k, n].

    Row i belongs to expert e where ends[e - 1] <= i < ends[e].
    """

    rows: str
    weight: str
    ends: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Tokens that a layer sorts by expert.

    Expert `chosen[j]` makes row j of the results from token j // k.

    `changed`: operators on the sorted rows, rewritten to read unsorted rows. `ordered`: the tensor
    with the rows back in their order, made of the sorted rows `result`.
    """

    tokens: str
    chosen: str
    changed: Mapping[str, Operator]
    ordered: str
    result: str


class Finder:
    """Makers and readers of the tensors of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {name: op for op in graph.operators for name in op.outputs}
        self.users: dict[str, list[Operator]] = {}
        for op in graph.operators:
            for name in dict.fromkeys(op.inputs):
                self.users.setdefault(name, []).append(op)
        self.wanted = {
            *graph.outputs,
            *graph.updates.values(),
            *((graph.loss,) if graph.loss else ()),
        }

    def reader(self, name: str) -> Operator | None:
        """The only operator that reads a tensor, if the tensor does not leave the model."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.wanted else None

    def given(self, op: Operator, name: str) -> str | None:
        """The tensor argument `name` of an operator."""
        value = op.attributes.get(name)
        return op.inputs[value.index] if isinstance(value, Ref) else None

    def product(self, op: Operator) -> Product | None:
        """An operator as a grouped product of rows and experts."""
        names = PRODUCTS.get(op.kind)
        if names is None or any(
            value is not None for name, value in op.attributes.items() if name not in names
        ):
            return None
        rows, weight, ends = (self.given(op, name) for name in names)
        if rows is None or weight is None or ends is None:
            return None
        shapes = [len(self.graph.tensors[name].shape) for name in (rows, weight)]
        return Product(rows=rows, weight=weight, ends=ends) if shapes == [2, 3] else None

    def changes_nothing(self, op: Operator) -> bool:
        """Whether an operator is a cast to its input's own type."""
        same = op.kind in _CASTS and len(op.inputs) == 1
        return (
            same
            and self.graph.tensors[op.inputs[0]].dtype == self.graph.tensors[op.outputs[0]].dtype
        )

    def uncast(self, name: str) -> str:
        """The tensor before operators that change nothing."""
        while (op := self.makers.get(name)) is not None and self.changes_nothing(op):
            name = op.inputs[0]
        return name

    def looked_up(self, name: str) -> tuple[str, str] | None:
        """The tensor and the index of its dim 0 where `name` holds rows of another."""
        op = self.makers.get(name)
        indices = op.attributes.get("indices") if op is not None and op.kind in _LOOK_UPS else None
        if (
            op is None
            or not isinstance(indices, tuple)
            or len(indices) != 1
            or not isinstance(indices[0], Ref)
        ):
            return None
        table = self.given(op, "self")
        index = op.inputs[indices[0].index]
        whole = (
            table is not None
            and len(self.graph.tensors[index].shape) == 1
            and self.graph.tensors[index].dtype == "int64"
        )
        return (table, index) if whole and table is not None else None

    def sort_of(self, name: str, place: int) -> Operator | None:
        """The ascending sort along the only dim of which `name` is result `place`."""
        op = self.makers.get(name)
        if (
            op is None
            or op.kind not in ("aten.sort.default", "aten.sort.stable")
            or op.outputs[place] != name
        ):
            return None
        if len(self.graph.tensors[op.inputs[0]].shape) == 1 and not op.attributes.get("descending"):
            return op
        return None

    def counted(self, ends: str) -> tuple[Operator, int] | None:
        """The sort whose values are counted by expert and added up to `ends`.

        With it, the number of experts.
        """
        total = self.makers.get(ends)
        if total is not None and total.kind == "aten.cumsum.default":
            count = self.makers.get(total.inputs[0])
        else:
            count = None
        if count is None or count.kind != "aten.histc.default":
            return None
        experts = count.attributes.get("bins")
        plain = (
            count.attributes.get("min", 0) == 0
            and isinstance(experts, int)
            and count.attributes.get("max") == experts - 1
        )
        cast = self.makers.get(count.inputs[0])
        values = cast.inputs[0] if cast is not None and cast.kind in _CASTS else count.inputs[0]
        sort = self.sort_of(values, 0)
        return (sort, experts) if plain and sort is not None and isinstance(experts, int) else None

    def bias(self, op: Operator, ends: str) -> str | None:
        """The biases [experts, n] that an operator looks up for rows sorted by expert."""
        source = self.looked_up(op.outputs[0])
        counted = self.counted(ends)
        if source is None or counted is None or source[1] != counted[0].outputs[0]:
            return None
        shape = self.graph.tensors[source[0]].shape
        return source[0] if len(shape) == 2 and shape[0] == counted[1] else None


def find_routing(finder: Finder, source: str, ends: str, final: str) -> Routing | None:
    """The way of tokens to the rows `source` and of the results `final` back to tokens.

    None if either is missing.
    """
    counted = finder.counted(ends)
    given = finder.looked_up(source)
    if counted is None or given is None:
        return None
    sort = counted[0]
    tokens = given[0]
    chosen = sort.inputs[0]
    places = sort.outputs[1]
    rows, count = (finder.graph.tensors[name].shape[0] for name in (chosen, tokens))
    per_token = finder.makers.get(given[1])
    of_places = (
        per_token is not None
        and per_token.kind == "aten.floor_divide.default"
        and per_token.inputs == (places,)
    )
    if (
        not of_places
        or per_token is None
        or rows % count
        or per_token.attributes.get("other") != rows // count
    ):
        return None
    if len(finder.graph.tensors[tokens].shape) != 2:
        return None
    changed: dict[str, Operator] = {}
    name = final
    while (reader := finder.reader(name)) is not None:
        if reader.kind in _LOOK_UPS:
            gather = finder.looked_up(reader.outputs[0])
            back = gather is not None and gather[0] == name and _undoes(finder, gather[1], places)
            if back:
                return Routing(
                    tokens=tokens,
                    chosen=chosen,
                    changed=changed,
                    ordered=reader.outputs[0],
                    result=name,
                )
            return None
        others = [other for other in reader.inputs if other != name]
        turned = [_unsorted(finder, other, places) for other in others]
        if reader.kind not in _BY_ROW or len(reader.inputs) > 2 or any(op is None for op in turned):
            return None
        changed |= {op.name: op for op in turned if op is not None}
        name = reader.outputs[0]
    return None


def _undoes(finder: Finder, index: str, places: str) -> bool:
    """Whether an index restores the order of sorted rows.

    `index[places] = 0, 1, 2, ...`, or the order of `places`.
    """
    op = finder.makers.get(index)
    if op is None:
        return False
    if op.kind == "aten.argsort.default":
        return op.inputs == (places,) and not op.attributes.get("descending")
    if (sort := finder.sort_of(index, 1)) is not None:
        return sort.inputs == (places,)
    if op.kind != "aten.index_put.default" or op.attributes.get("accumulate"):
        return False
    indices = op.attributes.get("indices")
    values = finder.given(op, "values")
    counting = finder.makers.get(values) if values is not None else None
    plain = (
        counting is not None
        and counting.kind == "aten.arange.default"
        and set(counting.attributes) <= {"end", "dtype"}
    )
    if (
        not plain
        or not isinstance(indices, tuple)
        or len(indices) != 1
        or not isinstance(indices[0], Ref)
    ):
        return False
    return op.inputs[indices[0].index] == places


def _unsorted(finder: Finder, name: str, places: str) -> Operator | None:
    """The operator that makes a column of sorted numbers, reading them unsorted."""
    op = finder.makers.get(name)
    if op is None or op.kind != "aten.unsqueeze.default" or finder.reader(name) is None:
        return None
    source = finder.looked_up(op.inputs[0])
    if source is None or source[1] != places or len(finder.graph.tensors[source[0]].shape) != 1:
        return None
    return replace(op, inputs=(source[0],))
