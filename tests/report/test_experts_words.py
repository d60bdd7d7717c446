"""The words for a layer of experts: for every option, and as the split that schemes are told by."""

from __future__ import annotations

from autopar.analysis.program.strategy_words import option_words
from autopar.frontends.torch.experts import join_experts
from autopar.schemes.meanings import read_meanings
from autopar.schemes.splits import Part, Split, profiles_of
from autopar.sharding.analysis import analyse
from tests.planning.accounting import HIDDEN, sorted_experts


def test_options_of_a_layer_in_words() -> None:
    rows = 16
    analysis = analyse(join_experts(sorted_experts(4, rows)), train=True)
    (layer,) = (op for op in analysis.warm if op.kind == "autopar.experts")
    offer = analysis.offers[layer.name]
    meanings = read_meanings(analysis)
    words = {
        option.name: option_words(layer.name, offer, option, layer.inputs, meanings)
        for option in offer.options
    }
    assert words == {
        "R": "replicated",
        "B": "replicated",
        "t": "batch",
        "e": "expert-parallel",
        "e+t": "expert-parallel",
        "f": "column-parallel, then row-parallel",
    }
    profile = profiles_of(analysis).by_name[layer.name]
    splits = dict(zip(words, profile.splits, strict=True))
    assert profile.part is Part.EXPERTS and profile.work == 2 * rows * HIDDEN * 2 * HIDDEN
    assert (
        splits["e"] is splits["e+t"] is Split.EXPERT
        and splits["f"] is Split.INNER
        and splits["t"] is Split.BATCH
    )
