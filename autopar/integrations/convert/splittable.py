"""The products whose weights a target splits: by their kind, and by the module that runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.stored_products import LINEAR_LOSS
from autopar.sharding.rules.experts import EXPERTS

from .axis_work import EMBEDDINGS

PRODUCTS = (
    "aten.linear.default",
    LINEAR_LOSS,
    "aten.matmul.default",
    "aten.mm.default",
    "aten.addmm.default",
    "autopar.affine",
    "aten.bmm.default",
    EXPERTS,
)
"""Products of values with a weight of two dims, and those of experts: what configurations split."""
OUTPUT_DIM: Mapping[str, int] = {
    "aten.linear.default": 0,
    LINEAR_LOSS: 0,
    "aten.matmul.default": 1,
    "aten.mm.default": 1,
    "aten.addmm.default": 1,
    "autopar.affine": 1,
}
"""The output dim of a linear layer's weight: [out, in] in torch's modules, [in, out] in products of
ONNX and GPT-2.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splittable:
    """The products that a target splits: of these `kinds`, or also by module.

    `modules`: only those that are all the work of a module, which holds their weight; nothing
    slices a value between modules either. `own_bias`: a bias that another module holds, too, is
    not split, nor is its product. `gathers`: look-ups bring the columns of their table together.
    """

    kinds: Collection[str] = PRODUCTS
    modules: bool = False
    own_bias: bool = False
    gathers: bool = False

    def takes(self, name: str, kind: str, held: Sequence[str], owners: Owners) -> bool:
        """Whether an operator's weight is split; `held`: its parameters, the weight first."""
        if kind not in self.kinds:
            return False
        if not self.modules:
            return True
        weight = held[0] if held else ""
        module = owners.module(name, weight)
        if self.own_bias and any(bias.rpartition(".")[0] != module for bias in held[1:]):
            return False
        return weight.endswith(".weight") and not owners.has_others(module, name)

    def looks_up(self, kind: str) -> bool:
        """Whether the table of a look-up is split: by module, that of an embedding alone."""
        return not self.modules or kind in EMBEDDINGS


BY_DEGREES = Splittable()
"""Those of targets that name degrees alone."""
BY_MODULE = Splittable(kinds=("aten.linear.default", LINEAR_LOSS), modules=True)
"""Those of styles of modules: torch's linear layers."""
BY_STYLE = replace(BY_MODULE, own_bias=True, gathers=True)
"""Those of transformers, which gives a module's style to the parameters of its name alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The modules of operators, by the operators' names alone."""

    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, names: Iterable[str]) -> Owners:
        """The modules of operators that are called so."""
        return cls(counts=Counter(name.rpartition("/")[0] for name in names if "/" in name))

    def has_others(self, module: str, name: str) -> bool:
        """Whether a module runs other operators than the one called `name`."""
        own = "/" in name and name.rpartition("/")[0] == module
        return self.counts[module] > own

    def module(self, name: str, weight: str) -> str:
        """The module whose weight an operator reads.

        A tied weight has the name of the first module that holds it. An operator that is named as
        a module is one.
        """
        owner = weight.rpartition(".")[0]
        called = name.rpartition("/")[0]
        if "/" not in name and not name.startswith(owner):
            return name
        return called if called and not self.has_others(called, name) else owner
