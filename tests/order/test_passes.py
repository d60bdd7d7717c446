"""The order of a rank: rounds of gathers and reductions beside the passes of segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from autopar.order.actions import Action, Word
from autopar.order.passes import STRIDE, Need, expand, one_stage
from autopar.order.units import Mode, Unit


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A chunk of as many segments as units, each of which reads its own unit.

    `gathered`, `reduced`: the rounds of each unit. `starts`: units by the one that they start from.
    """

    gathered: Sequence[int]
    reduced: Sequence[int] = ()
    mode: Mode = Mode.PER_PASS
    starts: Mapping[int, set[int]] = field(default_factory=dict)

    @property
    def units(self) -> Sequence[Unit]:
        return [
            Unit(number=number, mode=self.mode, groups=()) for number in range(len(self.gathered))
        ]

    def needs(self) -> Sequence[Need]:
        return [
            Need(forward=(n,), backward=(n,), reduced=(n,) if self.reduced else ())
            for n in range(len(self.gathered))
        ]

    def followers(self) -> Mapping[int, set[int]]:
        return self.starts

    def gather_rounds(self, unit: int) -> int:
        return self.gathered[unit]

    def reduce_rounds(self, unit: int, *, last: bool) -> int:
        return self.reduced[unit]

    def rests(self, unit: int, *, last: bool) -> bool:
        return False


def _text(chunk: Layers, *, train: bool = False, prefetch: int = 1, count: int = 1) -> str:
    actions = expand({0: chunk}, one_stage(count, train=train), prefetch=prefetch)
    return " ".join(map(str, actions))


def test_a_gather_begins_as_many_segments_ahead_as_it_has_rounds() -> None:
    assert _text(Layers(gathered=[1, 1, 2, 1])) == (
        "0UNSHARD.0 0UNSHARD.1 0UNSHARD.2 0F0.0 0RESHARD.0 0UNSHARD.2+1 0F0.1 0RESHARD.1 "
        "0UNSHARD.3 0F0.2 0RESHARD.2 0F0.3 0RESHARD.3"
    )


def test_without_prefetch_all_rounds_stand_in_front_of_the_reader() -> None:
    assert _text(Layers(gathered=[2, 0, 1]), prefetch=0) == (
        "0UNSHARD.0 0UNSHARD.0+1 0F0.0 0RESHARD.0 0F0.1 0UNSHARD.2 0F0.2 0RESHARD.2"
    )


def test_what_a_unit_starts_from_has_come_before_it_begins() -> None:
    """Unit 3 starts from the values of unit 2, which its segment needs as well."""

    @dataclass(frozen=True, kw_only=True)
    class Linked(Layers):
        def needs(self) -> Sequence[Need]:
            return [
                Need(forward=(n, *([2] if n == 3 else [])), backward=(), reduced=())
                for n in (0, 1, 4, 3)
            ]

    chunk = Linked(gathered=[1, 1, 1, 2, 1], starts={2: {3}})
    wanted = ["0UNSHARD.2", "0F0.0", "0UNSHARD.3", "0F0.1", "0UNSHARD.3+1", "0F0.2", "0F0.3"]
    assert [word for word in _text(chunk).split() if word in wanted] == wanted


def test_a_unit_that_would_begin_anew_at_once_stays() -> None:
    """The last unit is read again by the next visit, and one of two rounds by the visit after."""
    text = _text(Layers(gathered=[1, 2, 1]), train=True)
    assert text.count("UNSHARD.2") == 1 and text.count("RESHARD.2") == 1
    # Behind F1 its gather for B1 would begin two visits before B1: in front of F2, at once.
    assert text.split().count("0UNSHARD.1") == 2
    assert _text(Layers(gathered=[1, 3, 1]), train=True).split().count("0UNSHARD.1") == 1


def test_reductions_advance_a_round_every_few_visits() -> None:
    chunk = Layers(gathered=[0] * 6, reduced=[0, 0, 0, 0, 0, 2])
    words = _text(chunk, train=True).split()
    passes = [word for word in words if "B" in word]
    first, second, home = (words.index(f"0REDUCE_GRAD0.5{later}") for later in ("", "+1", "+2"))
    behind = [sum(word in passes for word in words[:place]) for place in (first, second, home)]
    assert behind == [1, 1 + STRIDE, 1 + 2 * STRIDE]


def test_at_the_end_the_rounds_that_are_left_are_issued_in_their_order() -> None:
    """There rounds follow one another, and what only takes home is left to the end of the step."""
    chunk = Layers(gathered=[0, 0], reduced=[2, 2])
    assert _text(chunk, train=True).endswith(
        "0B0.1 0REDUCE_GRAD0.1 0B0.0 0REDUCE_GRAD0.1+1 0REDUCE_GRAD0.0 0REDUCE_GRAD0.0+1"
    )


def test_gradients_are_taken_home_behind_a_backward_visit() -> None:
    """In the forward pass of the next micro-batch they would hold it up."""
    chunk = Layers(gathered=[0] * 4, reduced=[1] * 4, mode=Mode.SHARDS)
    words = _text(chunk, train=True, count=2).split()
    homes = [place for place, word in enumerate(words) if word.startswith("0REDUCE_GRAD0.0+1")]
    passes = [word for word in words[: homes[0]] if "F" in word or "B" in word]
    assert passes[-1] == "0B1.3"


def test_a_reduction_waits_for_those_that_start_from_its_unit() -> None:
    chunk = Layers(gathered=[0, 0, 0, 0], reduced=[1, 0, 1, 1], starts={2: {3}})
    words = _text(chunk, train=True).split()
    # Unit 3 is complete behind the first backward visit, and home STRIDE visits later.
    assert words.index("0REDUCE_GRAD0.2") > words.index("0B0.1")


def test_a_micro_batch_waits_for_the_reduction_of_the_one_before() -> None:
    chunk = Layers(gathered=[0], reduced=[3], mode=Mode.SHARDS)
    words = _text(chunk, train=True, count=2).split()
    own = [word for word in words if "REDUCE" in word]
    assert own == [
        f"0REDUCE_GRAD{number}.0{later}" for number in (0, 1) for later in ("", "+1", "+2")
    ]


@pytest.mark.parametrize("word", [Word.SEND_FORWARD, Word.RECEIVE_BACKWARD])
def test_what_follows_a_pass_begins_behind_its_sends_and_before_a_receive(word: Word) -> None:
    chunk = Layers(gathered=[1, 1])
    passes = [
        Action(word=Word.FORWARD, micro_batch=0),
        Action(word=word, micro_batch=0, peer=1),
        Action(word=Word.BACKWARD, micro_batch=0),
    ]
    words = list(map(str, expand({0: chunk}, passes, prefetch=1)))
    message = next(place for place, one in enumerate(words) if one.endswith(">1"))
    sends = word is Word.SEND_FORWARD
    assert (words[message + 1] == "0UNSHARD.0") if sends else (words[message - 1] == "0UNSHARD.0")


def test_a_late_reduction_leaves_those_of_later_micro_batches_under_way() -> None:
    """Unit 0 waits for unit 1, which starts from it, until unit 2, which starts from it as well, is
    under way for the next micro-batch.
    """
    chunk = Layers(gathered=[0] * 3, reduced=[1, 3, 3], mode=Mode.SHARDS, starts={0: {1, 2}})
    words = _text(chunk, train=True, count=2).split()
    late = words.index("0REDUCE_GRAD0.0")
    assert words.index("0REDUCE_GRAD0.1+2") < late
    assert words.index("0REDUCE_GRAD1.2") < late < words.index("0REDUCE_GRAD1.2+1")


def test_merged_passes_take_turns_wherever_an_exchange_sets_off() -> None:
    """An exchange sets off behind segments 0 and 1 forward, and behind 2 and 1 backward."""

    @dataclass(frozen=True, kw_only=True)
    class Experts(Layers):
        def needs(self) -> Sequence[Need]:
            return [
                Need(forward=(), backward=(), reduced=(), sets_off=(n in (0, 1), n in (1, 2)))
                for n in range(4)
            ]

    chunk = Experts(gathered=[])
    actions = expand({0: chunk}, one_stage(2, train=True, merges=True), prefetch=1)
    assert " ".join(map(str, actions)) == (
        "0F0.0 0F0.1 0F0.2 0F0.3 "
        "0F1.0 0B0.3 0B0.2 0F1.1 0B0.1 0F1.2 0F1.3 0B0.0 "
        "0B1.3 0B1.2 0B1.1 0B1.0"
    )


def test_merged_passes_are_those_of_passes_alone() -> None:
    alone, merged = (list(one_stage(4, train=True, merges=merges)) for merges in (False, True))
    flat = [action for one in merged for action in (one if isinstance(one, tuple) else (one,))]
    assert sorted(map(str, flat)) == sorted(map(str, alone))
    assert list(one_stage(3, train=False, merges=True)) == list(one_stage(3, train=False))
