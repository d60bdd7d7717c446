"""Sample calls that can be split by communicating inside: attention in a ring, scans, softmax;
sizes divide by 2, 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.ir.recipes import WINDOWED
from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import f, ints, n

SDPA = "aten.scaled_dot_product_attention.default"
WINDOWS = (
    {"left_window_size": 2},
    {"left_window_size": 4, "right_window_size": 3},
    {"left_window_size": 1, "is_causal": 1},
)


def _allowed(*shape: int) -> torch.Tensor:
    """A mask that leaves every query the first key."""
    mask = ints(*shape, high=5) > 1
    mask[..., 0] = True
    return mask


def _first(case: Sample) -> Sample:
    """The call without its further outputs."""
    (operator,) = case.graph.operators
    operator = replace(operator, outputs=operator.outputs[:1])
    return replace(case, graph=replace(case.graph, operators=(operator,), outputs=operator.outputs))


def attention() -> Iterator[Sample]:
    """Attention of torch: sequences of equal and unequal length, causal or not, grouped heads,
    masks of every shape.
    """
    q = n(2, 2, 12, 3)
    k = n(2, 2, 12, 3)
    v = n(2, 2, 12, 5)
    for causal in (False, True):
        yield sample(SDPA, f"causal {causal}", query=q, key=k, value=v, is_causal=causal)
        yield sample(
            SDPA,
            f"more queries, causal {causal}",
            query=n(2, 2, 24, 3),
            key=k,
            value=v,
            is_causal=causal,
        )
        yield sample(
            SDPA,
            f"more keys, causal {causal}",
            query=q,
            key=n(2, 2, 24, 3),
            value=n(2, 2, 24, 5),
            is_causal=causal,
            scale=0.3,
        )
        yield sample(
            SDPA,
            f"grouped, causal {causal}",
            query=n(2, 6, 12, 3),
            key=k,
            value=v,
            enable_gqa=True,
            is_causal=causal,
        )
        for heads in (
            2,
            6,
        ):  # values as wide as keys: blocks are left to torch's kernel where it serves
            given = {
                "query": n(2, heads, 12, 4),
                "key": n(2, 2, 12, 4),
                "value": n(2, 2, 12, 4),
                "enable_gqa": True,
            }
            yield sample(SDPA, f"{heads} heads, causal {causal}", **given, is_causal=causal)
    yield sample(
        SDPA, "three dims", query=n(4, 12, 3), key=n(4, 12, 3), value=n(4, 12, 5), is_causal=True
    )
    yield sample(SDPA, "two dims", query=n(12, 3), key=n(12, 3), value=n(12, 5))
    yield sample(SDPA, "shared keys", query=q, key=n(1, 2, 12, 3), value=n(1, 2, 12, 5))


def sinks() -> Iterator[Sample]:
    """Attention with sinks of heads, windows of keys, and a mask."""
    for heads, width in ((2, 4), (6, 4), (6, 5)):
        given = {"query": n(2, heads, 12, 4), "key": n(2, 2, 12, 4), "value": n(2, 2, 12, width)}
        for window in (0, 3, 7):
            for sinks in (n(heads), None):
                yield sample(
                    WINDOWED,
                    f"{heads} heads, {width} wide, window {window}, sinks {sinks is not None}",
                    **given,
                    sinks=sinks,
                    is_causal=True,
                    window=window,
                )
        mask = n(2, 1, 12, 12)
        yield sample(
            WINDOWED, f"mask, {heads} {width}", **given, sinks=n(heads), attn_mask=mask, scale=0.3
        )


def flash() -> Iterator[Sample]:
    """The form that torch's decompositions leave on the CPU, with its normalisers."""
    kind = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    given = {"query": n(2, 2, 12, 4), "key": n(2, 2, 12, 4), "value": n(2, 2, 12, 4)}
    blind = n(12, 12)
    blind[4] = -math.inf
    yield sample(kind, "plain", **given)
    yield sample(kind, "causal", **given, is_causal=True, scale=0.3)
    yield sample(kind, "added", **given, attn_mask=blind)


def masks() -> Iterator[Sample]:
    """Masks that are added or that hide, of every shape, and queries that see nothing."""
    q = n(2, 4, 12, 3)
    k = n(2, 2, 12, 3)
    v = n(2, 2, 12, 5)
    for shape in (
        (12, 12),
        (4, 12, 12),
        (2, 1, 12, 12),
        (2, 4, 12, 12),
        (1, 1, 12, 12),
        (2, 1, 1, 12),
        (1, 1, 12, 1),
    ):
        given = {"query": q, "key": k, "value": v, "enable_gqa": True}
        yield sample(SDPA, f"added {shape}", **given, attn_mask=n(*shape))
        yield sample(SDPA, f"hides {shape}", **given, attn_mask=_allowed(*shape))
    blind = _allowed(2, 1, 12, 12)
    blind[0, 0, 4] = False
    yield sample(SDPA, "blind", query=k, key=k, value=v, attn_mask=blind)


def scans() -> Iterator[Sample]:
    """Sums and products of what comes before, with zeros among the factors."""
    x = n(4, 12)
    x[0, 3] = x[1, 2] = x[1, 9] = 0
    for name in ("cumsum", "cumprod"):
        yield sample(f"aten.{name}.default", self=x, dim=1)
        yield sample(f"aten.{name}.default", "first dim", self=n(12, 4, 2), dim=-3)
    yield sample("aten.cumsum.default", "counts", self=ints(4, 12), dim=1)
    yield sample(
        "aten.cumsum.default", "counts as floats", self=ints(4, 12), dim=1, dtype="float64"
    )


def states() -> Iterator[Sample]:
    """Delta rules and state spaces, whose ranks pass states on."""
    keys = {name: n(2, 12, 2, 3) for name in ("query", "key")}
    for channels in ((), (3,)):
        yield sample(
            "autopar.gated_delta_rule.default",
            f"{len(channels)}",
            **keys,
            value=n(2, 12, 4, 5),
            decay=-f(2, 12, 4, *channels),
            beta=f(2, 12, 4),
            chunk_size=2,
            normalize=True,
        )
    for skip, bias in ((n(4), n(4)), (None, None)):
        yield sample(
            "autopar.state_space_scan.default",
            f"{skip is not None}",
            x=n(2, 12, 4, 5),
            step=f(2, 12, 4),
            decay=-f(4),
            **keys,
            skip=skip,
            bias=bias,
            chunk_size=2,
            softplus=True,
            low=0.0,
            high=float("inf"),
        )


def softmax() -> Iterator[Sample]:
    """Also of rows in which a shard is all minus infinity."""
    hidden = n(4, 12)
    hidden[0, :6] = hidden[1, 3] = -math.inf
    for name in ("softmax", "log_softmax"):
        yield sample(f"aten.{name}.int", self=n(4, 12), dim=-1)
        yield sample(f"aten.{name}.int", "first dim", self=n(12, 4, 4), dim=0)
        yield sample(f"aten.{name}.int", "one dim", self=n(12), dim=0, dtype="float64")
    yield sample("aten.softmax.int", "hidden", self=hidden, dim=1)


FAMILIES = {
    "attention": attention,
    "sinks": sinks,
    "flash": flash,
    "masks": masks,
    "scans": scans,
    "states": states,
    "softmax": softmax,
}
