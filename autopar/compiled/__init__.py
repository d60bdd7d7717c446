"""The compiled loops, where the package was built with a compiler; else numpy and Python do their
work, to the same bits.

    minimise    out[a, b, ...] = min over k of  t_0[k, a, b, ...] + t_1[k, a, b, ...] + ...
                a product of tensors in the semiring of minimum and sum; both forms add in the same
                order
    eliminate, assign
                all such products of an elimination, and the choices that attain its optimum
    descend     choices that are each the best given the others
    play        the times of a step's computations and transfers on the streams of a device
    walk        the memories that the steps of a program make and read
"""

try:
    from ._compiled import assign, descend, eliminate, minimise, play
    from .with_room import walk
# The wheel without binaries, and a machine without a compiler, have numpy and Python alone.
except ImportError:
    from .descent import descend
    from .elimination import assign, eliminate
    from .in_numpy import minimise
    from .in_python import walk
    from .streams_in_python import play

__all__ = ["assign", "descend", "eliminate", "minimise", "play", "walk"]
