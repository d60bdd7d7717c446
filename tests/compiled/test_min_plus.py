"""The compiled min-plus kernel equals that of numpy, and refuses what it cannot read."""

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import compiled
from autopar.compiled import in_numpy

Table = NDArray[np.float64]

needs_compiled = pytest.mark.skipif(
    compiled.minimise is in_numpy.minimise, reason="the package was installed without a compiler"
)


def test_numpy_in_several_blocks() -> None:
    draw = np.random.default_rng(0)
    left = draw.random((3, 600, 1))
    right = draw.random((3, 1, 200))
    out = np.empty((600, 200))
    assert out.size > 2 * in_numpy.BLOCK
    in_numpy.minimise(out, (left, right))
    assert (out == (left + right).min(axis=0)).all()


@needs_compiled
@pytest.mark.parametrize("seed", range(120))
def test_compiled_kernel_equals_numpy_bit_for_bit(seed: int) -> None:
    """Any shapes: axes of size 1, broadcast ones, rows above 512, infinite entries."""
    draw = np.random.default_rng(seed)
    rank = int(draw.integers(1, 5))
    shape = [int(draw.choice([1, 2, 3, 7, 40, 700 if rank < 3 else 5])) for _ in range(rank)]
    terms = []
    for _ in range(int(draw.integers(1, 5))):
        own = [shape[0], *(size if draw.random() < 0.7 else 1 for size in shape[1:])]
        term = draw.random(own)
        term[draw.random(own) < 0.1] = np.inf
        terms.append(term)
    # The first terms, or those behind them, may lack the axis of the rows.
    whole = int(draw.integers(len(terms)))
    terms[whole] = np.ascontiguousarray(np.broadcast_to(terms[whole], shape))
    expected = np.empty(shape[1:])
    in_numpy.minimise(expected, tuple(terms))
    got = np.full(shape[1:], np.nan)
    compiled.minimise(got, tuple(terms))
    assert got.tobytes() == expected.tobytes()


@needs_compiled
@pytest.mark.parametrize(
    ("out", "terms", "said"),
    [
        (np.empty(3), (np.zeros((2, 4)),), "do not fit"),
        (np.empty(3), (np.zeros((2, 3)), np.zeros((1, 3))), "do not fit"),
        (np.empty(3), (np.zeros((3, 2)).T,), "do not fit"),
        (np.empty(3), (np.zeros((2, 3))[:, ::-1],), "do not fit"),
        (np.empty((1, 3)), (np.zeros((2, 4, 3)),), "do not fit"),
        (np.empty(()), (np.zeros(()),), "do not fit"),
        (np.empty(3), (np.zeros((0, 3)),), "do not fit"),
        (np.empty(3), (np.zeros((2, 3), dtype=np.float32),), "float64"),
        (np.empty(3), (), "terms"),
        (np.empty(3), tuple(np.zeros((1, 3)) for _ in range(129)), "terms"),
    ],
)
def test_compiled_kernel_refuses(out: Table, terms: tuple[Table, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compiled.minimise(out, terms)
