"""The compiled loops, where the package was built with a compiler; else numpy and Python do their
work, to the same bits.

    minimise    out[a, b, ...] = min over k of  t_0[k, a, b, ...] + t_1[k, a, b, ...] + ...
                a product of tensors in the semiring of minimum and sum; both forms add in the same
                order
    eliminate, assign
                all such products of an elimination, and the choices that attain its optimum
"""

try:
    from ._compiled import assign, eliminate, minimise
# The wheel without binaries, and a machine without a compiler, have numpy and Python alone.
except ImportError:
    from .elimination import assign, eliminate
    from .in_numpy import minimise

__all__ = ["assign", "eliminate", "minimise"]
