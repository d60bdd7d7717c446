"""Digests of tensors: equal for equal contents on any device, unlike for any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.ranks.contents import SAMPLE, Contents, checksum

VALUE = torch.arange(6, dtype=torch.float32).view(2, 3)
OTHERS: dict[str, Tensor] = {
    "a bit": VALUE.clone().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(5.0000005)),
    "the shape": VALUE.view(3, 2),
    "the type": VALUE.view(torch.int32),
    "minus zero": torch.where(VALUE == 0, -0.0, VALUE),
    "the order": VALUE.t().contiguous().view(2, 3),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checksum_tells(what: str) -> None:
    assert checksum([OTHERS[what]]) != checksum([VALUE])


def test_a_checksum_is_of_the_contents() -> None:
    spread = torch.zeros(2, 6)
    spread[:, ::2] = VALUE
    nan = torch.tensor(float("nan"))
    assert checksum([spread[:, ::2]]) == checksum([VALUE]) and checksum([nan]) == checksum(
        [nan.clone()]
    )
    assert checksum([VALUE, nan]) != checksum([nan, VALUE]) and len(checksum([])) == 16
    assert checksum([torch.tensor(True), torch.zeros(0), torch.ones(2).to(torch.bfloat16)])


def test_a_large_tensor_is_sampled_unless_all_of_it_is_wanted() -> None:
    """Every column of a matrix is sampled; a number beside the sample is seen on demand only."""
    value = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    drawn = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    column = value.clone()
    column[:, 777] += 1.0
    number = value.clone()
    number[0, 1] += 1.0
    assert value.numel() > SAMPLE
    assert checksum([value]) == checksum([value.clone()])
    assert len({checksum([other]) for other in (value, drawn, column, value.t())}) == 4
    assert checksum([number]) == checksum([value])
    assert checksum([number], whole=True) != checksum([value], whole=True)


def test_every_element_of_a_small_tensor_counts() -> None:
    value = torch.zeros(300, dtype=torch.int64)
    digests = {checksum([value + (torch.arange(300) == place)]) for place in range(300)}
    assert len(digests | {checksum([value])}) == 301
    assert not value.any()


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.float16, torch.float8_e4m3fn, torch.complex128],
)
def test_every_type_has_a_digest(dtype: torch.dtype) -> None:
    values = [torch.tensor(numbers).to(dtype) for numbers in ([0.0, 1.0], [1.0, 0.0])]
    assert checksum([values[0]]) != checksum([values[1]])


def test_facts_count_beside_tensors() -> None:
    digests = set()
    for fact in (b"", b"model.safetensors", b"other.safetensors"):
        contents = Contents()
        contents.add_fact(fact)
        contents.add(VALUE)
        digests.add(contents.digest())
        assert contents.digest() in digests
    assert len(digests) == 3
