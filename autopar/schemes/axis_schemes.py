"""The table of axis schemes.

They say how data, tensor, sequence and expert parallelism split each part of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .axis import AxisScheme, Splits
from .splits import Part, Split


def _of(*splits: Split) -> Splits:
    return frozenset(splits)


BATCH, SEQUENCE, INNER, HIDDEN, EXPERT = map(
    _of, (Split.BATCH, Split.SEQUENCE, Split.INNER, Split.HIDDEN, Split.EXPERT)
)
UNSPLIT = _of(Split.WHOLE, Split.SHARE)
NOTHING = UNSPLIT | {Split.PARTIAL}
ANY = INNER | HIDDEN | SEQUENCE | BATCH


def _rows(
    name: str,
    words: str,
    split: Split,
    core: tuple[Splits, ...],
    needs: Mapping[Part, Splits],
    *,
    storage: str,
) -> AxisScheme:
    """Rows are split, and no weight is."""
    wanted = _of(split)
    other = wanted | {Split.INNER} if core == (INNER,) else wanted
    prefer = {
        Part.OTHER: (other, NOTHING),
        Part.PRODUCT: (wanted,),
        Part.EXPERTS: (wanted,),
        Part.LOOKUP: (wanted, UNSPLIT),
        Part.WEIGHT: (UNSPLIT,),
        Part.CORE: (*core, NOTHING),
    }
    return AxisScheme(
        name=name,
        words=words,
        prefer=prefer,
        needs={Part.PRODUCT: wanted, **needs},
        has=frozenset(needs),
        storage=storage,
    )


def _weights(
    name: str,
    words: str,
    product: Splits,
    other: tuple[Splits, ...],
    *,
    heads: bool = False,
    columns: bool = False,
) -> AxisScheme:
    """Weights are split, heads in attention (which `heads` demands); the rest as `other` says."""
    prefer = {
        Part.OTHER: (*other, NOTHING),
        Part.PRODUCT: (product,),
        Part.EXPERTS: (product,),
        Part.LOOKUP: (product, INNER, *other, NOTHING),
        Part.WEIGHT: (product | NOTHING,),
        Part.CORE: (INNER, NOTHING),
    }
    return AxisScheme(
        name=name,
        words=words,
        prefer=prefer,
        needs={Part.PRODUCT: product} | ({Part.CORE: INNER} if heads else {}),
        columns=columns,
    )


def _batch(name: str, words: str, storage: str) -> AxisScheme:
    return _rows(name, words, Split.BATCH, (BATCH,), {}, storage=storage)


_TENSOR = AxisScheme(
    name="tensor",
    words="every weight matrix is split",
    needs={Part.PRODUCT: INNER | HIDDEN},
    prefer={Part.OTHER: (ANY | NOTHING,), Part.PRODUCT: (INNER | HIDDEN,)},
)
_EXPERT = AxisScheme(
    name="expert",
    words="the experts are split; everything else splits the batch",
    needs={Part.EXPERTS: EXPERT, Part.PRODUCT: BATCH},
    has=frozenset({Part.EXPERTS}),
    prefer={
        Part.OTHER: (BATCH | EXPERT, NOTHING),
        Part.PRODUCT: (BATCH,),
        Part.EXPERTS: (EXPERT,),
        Part.LOOKUP: (BATCH, UNSPLIT),
        Part.CORE: (BATCH, NOTHING),
        Part.WEIGHT: (NOTHING | EXPERT,),
    },
)
_ULYSSES = _rows(
    "ulysses",
    "the sequence is split, and the heads inside attention; no weight is",
    Split.SEQUENCE,
    (INNER,),
    {Part.CORE: INNER},
    storage="whole",
)
_CONTEXT = _rows(
    "context",
    "the sequence is split, inside attention too",
    Split.SEQUENCE,
    (_of(Split.RING), SEQUENCE),
    {Part.CORE: SEQUENCE | {Split.RING}},
    storage="whole",
)
_PARALLEL = "heads, feed-forward and vocabulary are split"
_MEGATRON = _weights(
    "megatron", f"{_PARALLEL}; activations between are whole", INNER, (INNER | NOTHING,), heads=True
)
_MEGATRON_SP = _weights(
    "megatron-sp",
    f"{_PARALLEL}, and the sequence between them",
    INNER,
    (INNER | SEQUENCE,),
    heads=True,
)


def _folded(scheme: AxisScheme) -> AxisScheme:
    """The scheme, with the experts split on its axis in place of what it splits of each."""
    first, *others = scheme.prefer[Part.OTHER]
    return replace(
        scheme,
        name=f"expert+{scheme.name}",
        words=f"the experts are split; of everything else, {scheme.words}",
        needs={**scheme.needs, Part.EXPERTS: EXPERT},
        has=scheme.has | {Part.EXPERTS},
        prefer={
            **scheme.prefer,
            Part.OTHER: (first | EXPERT, *others),
            Part.EXPERTS: (EXPERT,),
            Part.WEIGHT: (*(s | EXPERT for s in scheme.prefer[Part.WEIGHT]),),
        },
    )


AXIS_SCHEMES: Mapping[str, AxisScheme] = {
    scheme.name: scheme
    for scheme in (
        _batch("data", "the batch is split; every device holds all parameters", "whole"),
        _batch(
            "zero1",
            "the batch is split, and so are stored parameters, their gradients and optimizer state",
            "split",
        ),
        _batch("zero2", "as zero1, with gradients split after every micro-batch", "split"),
        _batch("zero3", "as zero2, with parameters gathered again for the backward pass", "split"),
        _TENSOR,
        _MEGATRON,
        _MEGATRON_SP,
        _ULYSSES,
        _CONTEXT,
        _EXPERT,
        *map(_folded, (_MEGATRON, _MEGATRON_SP, _ULYSSES, _CONTEXT)),
        _weights(
            "columns",
            "every weight matrix is split along its outputs",
            INNER | HIDDEN,
            (ANY,),
            columns=True,
        ),
        _weights("hidden", "the hidden dim of every weight matrix is split", HIDDEN, (ANY,)),
        _weights("inner", f"{_PARALLEL}; activations are split anywhere", INNER, (ANY,)),
    )
}
"""The schemes of one mesh axis, by name."""
