"""Programs of schemes as the literature draws them, pinned operator by operator, and the bytes that
they move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.costmodel.collectives.bus_bandwidth import bus_factor
from autopar.frontends.load import LoadedModel, ModelOptions, load_model
from autopar.ir import Graph, Operator, Ref, Role, Tensor
from autopar.order.scheduled import scheduled
from autopar.sharding.analysis import Offer, analyse
from autopar.sharding.layout import P, Placement, R, S
from autopar.sharding.mesh import Mesh, degree_of
from autopar.sharding.program import Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import PLAIN, Schedule
from tests.sharding.direct_assignment import pinned_assignment

ITEMSIZE = 4
BATCH = 4
SEQUENCE = 8
HIDDEN = 16
HEADS = 4
BSH = BATCH * SEQUENCE * HIDDEN * ITEMSIZE
"""Bytes of a layer's activation."""
HH = HIDDEN * HIDDEN * ITEMSIZE
"""Bytes of a square weight."""


class Attention(nn.Module):
    """Self-attention with separate projections, its sum with its input, and a norm before it where
    one is wanted.
    """

    def __init__(self, *, norm: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] to [b, s, h]."""
        b, s, h = x.shape
        y = self.norm(x)
        q, k, v = (
            f(y).view(b, s, HEADS, h // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        out: torch.Tensor = x + self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, h)
        )
        return out


class FeedForward(nn.Module):
    """The feed-forward block, four times as wide inside, and its sum with its input."""

    def __init__(self, *, norm: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=bias)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] to [b, s, h]."""
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Experts(nn.Module):
    """Experts of equal capacity: `x` [e, c, h] holds the rows of each expert, as a router of fixed
    capacity leaves them.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 2 * HIDDEN) / HIDDEN)
        self.down = nn.Parameter(torch.randn(experts, 2 * HIDDEN, HIDDEN) / HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[e, c, h] to [e, c, h]."""
        rows = x * self.scale
        out: torch.Tensor = rows + torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)
        return out


def model_of(blocks: Sequence[nn.Module], *shape: int) -> LoadedModel:
    """The blocks one after the other, with an input of this shape."""
    torch.manual_seed(0)
    return load_model(
        nn.Sequential(*blocks), ModelOptions(train=True, dtype="float32"), (torch.randn(shape),)
    )


def transformer(layers: int, *, norm: bool = True, bias: bool = True) -> LoadedModel:
    """Transformer layers."""
    torch.manual_seed(0)
    blocks = [
        kind(norm=norm, bias=bias) for _ in range(layers) for kind in (Attention, FeedForward)
    ]
    return model_of(blocks, BATCH, SEQUENCE, HIDDEN)


# dim that is split where tokens come first [b, s, ...], and where heads do [b, heads, s, d]
DIMS: Mapping[str, tuple[int, int]] = {"batch": (0, 0), "sequence": (1, 2), "heads": (2, 1)}


def sorted_experts(experts: int, rows: int) -> Graph:
    """Two grouped products over rows that are sorted by expert, as transformers writes them, with a
    GELU between.
    """
    shapes = {
        "rows": (rows, HIDDEN),
        "first": (rows, 2 * HIDDEN),
        "wide": (rows, 2 * HIDDEN),
        "second": (rows, HIDDEN),
        "loss": (),
    }
    tensors = {
        name: Tensor(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()
    }
    tensors |= {
        "x": Tensor(name="x", shape=(rows, HIDDEN), dtype="float32", role=Role.INPUT),
        "ends": Tensor(name="ends", shape=(experts,), dtype="int32", role=Role.INPUT),
        "scale": Tensor(
            name="scale", shape=(HIDDEN,), dtype="float32", role=Role.PARAMETER, trainable=True
        ),
        "up": Tensor(
            name="up",
            shape=(experts, HIDDEN, 2 * HIDDEN),
            dtype="float32",
            role=Role.PARAMETER,
            trainable=True,
        ),
        "down": Tensor(
            name="down",
            shape=(experts, 2 * HIDDEN, HIDDEN),
            dtype="float32",
            role=Role.PARAMETER,
            trainable=True,
        ),
    }
    grouped = "transformers.grouped_mm_fallback.default"
    places = {"input": Ref(0), "weight": Ref(1), "offs": Ref(2)}
    both = {"self": Ref(0), "other": Ref(1)}
    operators = (
        Operator(
            name="scaled",
            kind="aten.mul.Tensor",
            inputs=("x", "scale"),
            outputs=("rows",),
            attributes=both,
        ),
        Operator(
            name="up/grouped",
            kind=grouped,
            inputs=("rows", "up", "ends"),
            outputs=("first",),
            attributes=places,
        ),
        Operator(
            name="gelu",
            kind="aten.gelu.default",
            inputs=("first",),
            outputs=("wide",),
            attributes={"self": Ref(0)},
        ),
        Operator(
            name="down/grouped",
            kind=grouped,
            inputs=("wide", "down", "ends"),
            outputs=("second",),
            attributes=places,
        ),
        Operator(
            name="mean",
            kind="autopar.mean_square",
            inputs=("second",),
            outputs=("loss",),
            attributes={"self": Ref(0)},
        ),
    )
    return Graph(
        name="experts",
        tensors=tensors,
        operators=operators,
        inputs=("x", "ends"),
        outputs=("second",),
        loss="loss",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The values that an axis splits: those between the blocks (`residual`), those inside them, the
    attention itself, and the results of the second matrices.
    """

    residual: Placement
    inner: str
    attention: str
    closing: Placement

    def of(self, operator: Operator) -> Placement:
        """The placement of an operator's output (of the loss's input)."""
        owner, _, kind = operator.name.partition("/")
        tokens, heads = DIMS[self.inner]
        word = kind.partition(".")[0]
        if owner == "loss" or word in ("layer_norm", "add"):
            return self.residual
        if owner.endswith((".o", ".down")):
            return self.closing
        if word == "scaled_dot_product_attention":
            return S(DIMS[self.attention][1])
        return S(heads if word == "transpose" and kind != "transpose.3" else tokens)


DATA = Split(residual=S(0), inner="batch", attention="batch", closing=S(0))
MEGATRON = Split(residual=R, inner="heads", attention="heads", closing=P)
MEGATRON_SEQUENCE = Split(residual=S(1), inner="heads", attention="heads", closing=P)
ULYSSES = Split(residual=S(1), inner="sequence", attention="heads", closing=S(1))
SUMMA = Split(residual=S(2), inner="heads", attention="heads", closing=S(2))
"""Columns of every matrix: with `DATA` on a second axis, and parameters split there too, the blocks
of two dims.
"""


def _travelling(offer: Offer) -> Offer:
    """The offer without what a dispatch would replace."""
    return replace(
        offer,
        options=tuple(option for option in offer.options if option.communication == "dispatch")
        or offer.options,
    )


Wanted = Callable[[Operator], Sequence[Placement]]


def program_of(
    graph: Graph,
    mesh: Mesh,
    wanted: Wanted,
    *,
    storage: Sequence[int] = (),
    travelling: bool = False,
) -> Program:
    """The program in which every operator has the wanted output, parameters stored split over the
    axes `storage` too.

    `travelling`: rows travel to their experts wherever they can.
    """
    analysis = analyse(graph, train=True)
    if travelling:
        analysis = replace(
            analysis, offers={name: _travelling(offer) for name, offer in analysis.offers.items()}
        )
    placements = {op.name: tuple(wanted(op)) for op in analysis.warm}
    return build_program(
        graph, pinned_assignment(analysis, mesh, placements, split_storage=storage)
    )


def program(model: LoadedModel, mesh: Mesh, *splits: Split, storage: Sequence[int] = ()) -> Program:
    """The program of a transformer with a split on each axis."""
    return program_of(
        model.graph, mesh, lambda op: [split.of(op) for split in splits], storage=storage
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A collective: of a program's list, or as a rank issued it."""

    phase: str
    kind: str
    group: int
    nbytes: int
    axis: str = ""
    parameter: bool = False

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a ring."""
        return bus_factor(self.kind, self.group) * self.nbytes


ONE_BY_ONE = Schedule(unit_bytes=1)
"""Every parameter travels by itself, as the published counts have it."""


def priced(built: Program, schedule: Schedule = PLAIN) -> list[Moved]:
    """The list of a program under a schedule."""
    mesh = built.assignment.mesh
    tensors = built.graph.tensors
    return [
        Moved(
            phase=c.phase,
            kind=c.kind,
            group=degree_of(c.axes, mesh.shape),
            nbytes=c.nbytes,
            axis=mesh.name(c.axes),
            parameter=tensors[c.tensor].role is Role.PARAMETER,
        )
        for c in scheduled(built, schedule).collectives()
        if degree_of(c.axes, mesh.shape) > 1 and tensors[c.tensor].shape
    ]


def counted(moved: Iterable[Moved], **wanted: Any) -> Counter[tuple[str, str, int]]:
    """How many there are of each (phase, kind, bytes), among those whose fields are as wanted."""
    return Counter(
        (m.phase, m.kind, m.nbytes)
        for m in moved
        if all(getattr(m, name) == value for name, value in wanted.items())
    )


def sent(moved: Iterable[Moved], **wanted: Any) -> float:
    """Bytes that a rank sends in them."""
    return math.fsum(
        m.sent for m in moved if all(getattr(m, name) == value for name, value in wanted.items())
    )
