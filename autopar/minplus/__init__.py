"""The min-plus kernel, compiled where the package was built with a compiler, else in numpy.

    out[a, b, ...] = min over k of  t_0[k, a, b, ...] + t_1[k, a, b, ...] + ...

It is a product of tensors in the semiring of minimum and sum. Both forms add in the same order, so
that their results are equal bit for bit.
"""

try:
    from ._compiled import minimise
# The wheel without binaries, and a machine without a compiler, have numpy alone.
except ImportError:
    from .in_numpy import minimise

__all__ = ["minimise"]
