"""The models of published runs: sizes of a row, or of the public model that it names.

And the work of a token.

forward FLOPs a token of a layer = 2 x the elements of the matrices that it meets + 4 keys x head
size x heads
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.costmodel.frameworks import Framework
from benchmarks.validating.known.shape import PATTERN, Latent, Shape, StateSpace

from .missing import Missing

Row = Mapping[str, str]
DATA = Path(__file__).with_name("data")
OWN = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
"""Sizes that a row may give itself."""


@functools.cache
def public_models() -> Mapping[str, Shape]:
    """Shapes by every name of a public model; `data/models.json` has the source of each."""
    shapes: dict[str, Shape] = {}
    for name, entry in json.loads((DATA / "models.json").read_text(encoding="utf-8")).items():
        given: dict[str, Any] = dict(entry["shape"])
        if "latent" in given:
            given["latent"] = Latent(**given["latent"])
        if "state" in given:
            given["state"] = StateSpace(**given["state"])
        shape = Shape(**given, sequence=1)
        shapes.update(dict.fromkeys((name, *entry["names"]), shape))
    return shapes


def number(row: Row, name: str, default: int = 1) -> int:
    """A whole number of a row, or the default where it gives none."""
    return int(float(row[name])) if row.get(name) else default


def shape_of(row: Row, work: Framework) -> Shape:
    """The model of a row.

    Raises `Missing` where neither the row nor the table of public models has its sizes.
    """
    if not row["seq_len"]:
        raise Missing("not given: seq_len")
    known = public_models().get(row["model"])
    own = {name: number(row, name) for name in OWN if row[name]}
    if known is not None:
        # Vocabularies are padded, and cut models have fewer layers; an expert's width is in the
        # column of the dense one.
        given = {name: own[name] for name in ("layers", "vocab") if name in own}
        shape = replace(known, sequence=number(row, "seq_len"), **given)
    else:
        shape = _own_shape(row, own)
    dropout = shape.dropout and row["group"] not in WITHOUT_DROPOUT
    return replace(shape, dropout=dropout).run_by(work)


WITHOUT_DROPOUT = ("mpt", "nemo_2407", "mbridge", "mlm_h100", "torchtitan", "fms", "alpa_ws")


def _own_shape(row: Row, own: Mapping[str, int]) -> Shape:
    missing = [name for name in ("layers", "hidden", "vocab") if name not in own]
    if missing:
        raise Missing(f"not given: {', '.join(missing)}")
    hidden = own["hidden"]
    heads = own.get("heads") or next(heads for heads in (96, 64, 32, 1) if hidden % heads == 0)
    llama = row["arch"] == "llama"
    shape = Shape(
        layers=own["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=own.get("kv_heads", heads),
        ffn=own.get("ffn", 4 * hidden),
        vocab=own["vocab"],
        sequence=number(row, "seq_len"),
        gated=row["gated_mlp"] == "1",
        tied=not llama,
        bias=not llama,
        dropout=not llama,
        norm="rms_norm" if llama else "layer_norm",
        position=_position(row, llama),
    )
    return shape if number(row, "experts", 0) < 2 else _with_experts(row, shape)


WIDTHS = (4, 8, 2)
PERIODS = (1, 2, 4)
"""Widths of a feed-forward part in hidden dims, and layers of which one has experts, where a row
does not say: those are taken that make its number of parameters.
"""
SAME = 0.02
"""The share by which a number of parameters may be off: biases, norms and rounding."""


def _with_experts(row: Row, dense: Shape) -> Shape:
    """The shape with experts in as many layers as make the row's number of parameters."""
    if not row.get("params_b"):
        raise Missing("not given: params_b, from which the layers of experts follow")
    # GShard's gate sends a token to two experts (alpa-projects/alpa: model/moe.py).
    top_k = number(row, "topk", 2 if "lpa" in row["framework"] else 0)
    if not top_k:
        raise Missing("not given: topk")
    widths = (dense.ffn,) if row["ffn"] else tuple(width * dense.hidden for width in WIDTHS)
    shapes = [
        replace(dense, experts=number(row, "experts"), top_k=top_k, ffn=ffn, expert_every=every)
        for ffn in widths
        for every in PERIODS
    ]
    count = float(row["params_b"]) * 1e9
    best = min(shapes, key=lambda shape: abs(parameters(shape) / count - 1))
    if abs(parameters(best) / count - 1) > SAME:
        raise Missing(f"no layers of experts make {row['params_b']} billion parameters")
    return best


def parameters(shape: Shape) -> float:
    """Elements of the matrices of a model of GPT's or Llama's kind, with or without experts."""
    s = shape
    matrices = 3 if s.gated else 2
    feed = matrices * s.hidden * (s.expert_ffn or s.ffn)
    attention = s.hidden * s.width * (2 * s.heads + 2 * s.kv_heads)
    layers = sum(attention + feed * (s.experts if "experts" in kind else 1) for kind in s.kinds())
    return layers + (1 if s.tied else 2) * s.vocab * s.hidden


def _position(row: Row, llama: bool) -> str:
    if llama:
        return "rotary"
    return "alibi" if "BLOOM" in row["framework"] else "learned"


def forward_flops(shape: Shape) -> float:
    """FLOPs of a token's forward pass, a causal mask not counted as half."""
    return sum(
        layer_flops(shape, kind) for kind in shape.kinds()
    ) + 2.0 * shape.hidden * shape.vocab * (1 + shape.mtp)


def layer_flops(shape: Shape, kind: str) -> float:
    """FLOPs of a token's forward pass through a layer of a kind."""
    s = shape
    h = shape.hidden
    matrices = 3 if s.gated else 2
    if kind == PATTERN["M"] and s.state:
        m = s.state
        scan = m.chunk * (m.groups * m.size + m.inner) + 2 * m.size * m.inner
        return 2.0 * (h * (3 * m.inner + 2 * m.groups * m.size + m.heads) + scan)
    if s.latent:
        m = s.latent
        if m.q_rank:
            query = h * m.q_rank + m.q_rank * s.heads * (m.nope + m.rope)
        else:
            query = h * s.heads * (m.nope + m.rope)
        projections = (
            query
            + h * (m.kv_rank + m.rope)
            + m.kv_rank * s.heads * (m.nope + m.value)
            + s.heads * m.value * h
        )
        width = m.nope + m.rope + m.value
    else:
        projections = h * s.width * (2 * s.heads + 2 * s.kv_heads)
        width = 2 * s.width
    if "experts" in kind:
        narrow = s.expert_hidden or h
        feed = matrices * (s.top_k * (s.expert_ffn or s.ffn) * narrow + s.shared_ffn * h) + (
            2 * h * narrow if s.expert_hidden else 0
        )
    else:
        feed = matrices * h * s.ffn
    keys = min(s.window, s.sequence) if "windowed" in kind else s.sequence
    if kind in (PATTERN["E"], PATTERN["-"]):
        return 2.0 * feed
    attention = 2.0 * projections + attention_flops(s, keys, width)
    return attention if kind == PATTERN["*"] else attention + 2.0 * feed


def attention_flops(shape: Shape, keys: int, width: int) -> float:
    """FLOPs of a token's scores and their product with the values.

    `width`: elements of a key and a value together.
    """
    return 2.0 * shape.heads * keys * width
