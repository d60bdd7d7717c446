"""Recipes of precision: which products read their operands in 8 bits or fewer, and how.

An operand is divided into blocks, each with a scale s, and its elements are rounded to a narrow
type whose largest number is `most`:

    s = max |x| of the block / most,   q = round(x / s),   x ~ s q

A recipe names the blocks and the types of operands and of gradients. Weights, activations between
products, sums and the optimizer stay as they are without it.

Sources: Transformer Engine, transformer_engine/common/recipe/__init__.py (Float8CurrentScaling,
Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling); DeepSeek-V3 (arXiv:2412.19437, section
3.3); OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import UsageError, unknown

from .graph import DTYPE_BYTES, Graph, NarrowCopy, Operator, Role, Tensor, Value
from .stored_products import EXPERTS, STORED, with_stored_experts, with_stored_products

PLAIN = "bf16"
"""The precision in which no product is narrow."""
BITS: Mapping[str, float] = {"float8_e4m3fn": 8, "float8_e5m2": 8, "float4_e2m1": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A way in which products read their operands.

    `kernel`: the type of the device's measured products. `needs`: the families of types that a
    device must have. `values`, `gradients`: types of elements of values and weights, and of
    gradients of results. `block`: elements in a row that share a scale (0: the whole tensor has
    one). `square`: weights have a scale for each block x block. `scale`: type of a block's scale.
    `over`: a scale of the whole tensor stands over those of blocks. A layer of experts has scales
    of rows where others have one of the tensor, and makes gradients of weights in the type of its
    values: the rows of an expert lie on other ranks under every plan, and so would its blocks.
    """

    name: str
    kernel: str
    needs: tuple[str, ...]
    values: str
    gradients: str
    block: int = 0
    square: bool = False
    scale: str = "float32"
    over: bool = False

    @property
    def whole(self) -> bool:
        """Whether a tensor's largest element, wherever it lies, decides about all of it."""
        return self.over or not self.block

    @property
    def holds(self) -> bool:
        """Whether a weight has one narrow copy for all products.

        Where rows and columns are rounded apart it has two, which are no smaller than 16 bits.
        """
        return self.square or not self.block

    @property
    def traffic(self) -> float:
        """Bytes moved by a cast for each byte of an operand in 16 bits.

        It is read, before that for its largest element if that is the tensor's, and written narrow.
        """
        return (2.0 if self.whole else 1.0) + self.bytes / 2

    @property
    def bytes(self) -> float:
        """Bytes of an element with its share of a scale."""
        shared = DTYPE_BYTES.get(self.scale, 1) / self.block if self.block else 0.0
        return BITS[self.values] / 8 + shared


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="fp8",
            kernel="float8_e4m3fn",
            needs=("float8",),
            values="float8_e4m3fn",
            gradients="float8_e5m2",
        ),
        Recipe(
            name="fp8-block",
            kernel="float8_block",
            needs=("float8_block",),
            values="float8_e4m3fn",
            gradients="float8_e4m3fn",
            block=128,
            square=True,
        ),
        # Only tensor units that multiply four bits apply a scale to every 32 elements themselves.
        Recipe(
            name="mxfp8",
            kernel="float8_block",
            needs=("float8_block", "float4"),
            values="float8_e4m3fn",
            gradients="float8_e4m3fn",
            block=32,
            scale="float8_e8m0fnu",
        ),
        Recipe(
            name="nvfp4",
            kernel="float4",
            needs=("float4",),
            values="float4_e2m1",
            gradients="float4_e2m1",
            block=16,
            square=True,
            scale="float8_e4m3fn",
            over=True,
        ),
    )
}
NAMES = (PLAIN, *RECIPES)
ALIGNED = 16
"""Products whose sides are no multiples of it have no narrow kernels (Transformer Engine, "FP8
dimensions must be divisible by 16").
"""
CHOOSING = frozenset((*("aten.topk.default", "aten.sort.default", "aten.argmax.default"),))
"""Operators that choose experts: the product that scores them is a router's."""
ATTENTION = "aten.scaled_dot_product_attention.default"
WINDOWED = "autopar.attention.default"
"""Attention with what torch's own lacks: sinks, windows of keys, capped scores."""
ATTENTIONS = frozenset((ATTENTION, WINDOWED))
MULTIPLYING = frozenset(
    (
        *(*STORED, EXPERTS, *ATTENTIONS),
        *("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.addmm.default"),
    )
)


def recipe_named(name: str | None) -> Recipe | None:
    """The recipe called `name`, None for the plain precision; an unknown name is a `UsageError`."""
    if name is not None and name not in NAMES:
        raise UsageError(unknown("precision", name, NAMES))
    return RECIPES.get(name or PLAIN)


def recipe_of(operator: Operator) -> Recipe | None:
    """The recipe of an operator's products, None where they are in the type of its operands."""
    name = operator.attributes.get("recipe")
    return RECIPES[name] if isinstance(name, str) else None


def recipe_in(graph: Graph) -> Recipe | None:
    """The recipe that products of a graph follow."""
    recipes = map(recipe_of, graph.operators)
    return next((recipe for recipe in recipes if recipe is not None), None)


def with_precision(graph: Graph, name: str | None) -> Graph:
    """The graph whose linear products and layers of experts follow a recipe.

    The last product before the loss and the products that score experts keep their types. A graph
    without any product for the recipe is a `UsageError`.
    """
    recipe = recipe_named(name)
    if recipe is None:
        return graph
    graph = with_stored_products(graph)
    narrow = _narrow(graph)
    if not narrow:
        raise UsageError(
            f"--precision {name}: {graph.name} has no product that it applies to: linear products "
            f"of weights whose sides are multiples of {ALIGNED}, other than the last and those "
            "that score experts, and layers of experts"
        )
    alone = _read_once(graph, narrow)
    copies: dict[str, Tensor] = {}
    if recipe.holds:
        graph = with_stored_experts(graph, narrow)
        copies = _copies(graph, narrow, recipe)
    operators = []
    for operator in graph.operators:
        if operator.name in narrow:
            attributes: dict[str, Value] = {
                **operator.attributes,
                "compute": recipe.kernel,
                "recipe": recipe.name,
            }
            if operator.name in alone:
                attributes["keeps_narrow"] = True
            operator = replace(operator, attributes=attributes)
        operators.append(operator)
    return replace(graph, operators=tuple(operators), tensors={**graph.tensors, **copies})


def _copies(graph: Graph, narrow: Iterable[str], recipe: Recipe) -> dict[str, Tensor]:
    """The weights that one narrow product reads and nothing else does, with their narrow copies."""
    chosen = set(narrow)
    readers = graph.consumers()
    copies = {}
    for operator in graph.operators:
        weights = (graph.tensors[name] for name in operator.inputs if operator.name in chosen)
        for weight in filter(_is_matrix, weights):
            if len(readers[weight.name]) == 1 and weight.name not in graph.outputs:
                copies[weight.name] = replace(weight, narrow=narrow_copy(weight, recipe))
    return copies


def _is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a stored matrix of a product, or those of a layer's experts."""
    return tensor.role is Role.PARAMETER and len(tensor.shape) > 1


def narrow_copy(weight: Tensor, recipe: Recipe) -> NarrowCopy:
    """The narrow copy of a matrix, or of those of all experts."""
    *leading, rows, columns = weight.shape
    whole = (*(1 for _ in leading), rows, columns)
    side = recipe.block
    return NarrowCopy(
        recipe=recipe.name,
        bits=int(BITS[recipe.values]),
        blocks=(*whole[:-2], side, side) if side else whole,
        over=whole if recipe.over else (),
    )


def _narrow(graph: Graph) -> frozenset[str]:
    """The operators whose products may follow a recipe."""
    products = {op.name for op in graph.operators if _is_product(graph, op)}
    experts = {op.name for op in graph.operators if op.kind == EXPERTS}
    chosen: set[str] = set()
    followed: set[str] = set()
    # Walked from the end: the tensors that lead to a further product, and those that lead to a
    # choice of experts without a product in between.
    leading: set[str] = set()
    choosing: set[str] = set()
    for operator in reversed(graph.operators):
        name = operator.name
        if not leading.isdisjoint(operator.outputs):
            followed.add(name)
        if not choosing.isdisjoint(operator.outputs):
            chosen.add(name)
        if name in followed or name in products or name in experts:
            leading.update(operator.inputs)
        multiplies = operator.kind in MULTIPLYING
        if operator.kind in CHOOSING or (name in chosen and not multiplies):
            choosing.update(operator.inputs)
    return frozenset(((products & followed) | experts) - chosen)


def _is_product(graph: Graph, operator: Operator) -> bool:
    """Whether an operator multiplies values by a stored matrix with sides for narrow kernels."""
    if operator.kind not in STORED:
        return False
    values, weight = (graph.tensors[name] for name in operator.inputs[:2])
    return (
        weight.role is Role.PARAMETER
        and len(weight.shape) == 2
        and len(values.shape) > 1
        and values.dtype == weight.dtype
        and not any(size % ALIGNED for size in weight.shape)
    )


VIEWS = frozenset(
    (
        *("aten.view.default", "aten.reshape.default", "aten.transpose.int"),
        "aten.contiguous.default",
    )
)


def _read_once(graph: Graph, narrow: Iterable[str]) -> frozenset[str]:
    """Linear products whose values nothing else keeps, so that the backward pass needs a copy.

    It may be narrow, then. Values with several readers are kept once for all, as they are.
    """
    chosen = set(narrow)
    readers = graph.consumers()
    makers = {name: op for op in graph.operators for name in op.outputs}
    alone = set()
    for operator in graph.operators:
        if operator.name not in chosen or operator.kind not in STORED:
            continue
        name = operator.inputs[0]
        root = name
        while root in makers and makers[root].kind in VIEWS and len(readers[root]) == 1:
            root = makers[root].inputs[0]
        # Attention keeps its result itself, as activations keep theirs.
        keeps = root not in makers or makers[root].kind in ATTENTIONS | VIEWS | KEEPING
        if len(readers[root]) == 1 and not keeps:
            alone.add(operator.name)
    return frozenset(alone)


KEEPING = frozenset((*("aten.relu.default", "aten.tanh.default", "aten.sigmoid.default"),))
"""Operators whose result is kept for their own backward pass."""
