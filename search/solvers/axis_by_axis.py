"""The choices of variables, ever more of them decided, one mesh axis after the other.

A prefix is a choice's digits on the first axes. Of all choices with one prefix a single one stands
for it: on each further axis it has the digit of the prefix's last axis if it can, else none. So
a variable has as many candidates as prefixes, however many axes follow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tables import Indices

UNLIKE = 3
"""Steps from another digit to that of the prefix's last axis; from none it is one."""


class Prefixes:
    """The prefixes of variables' choices.

    `tables`: the distinct arrays of digits [choices, axes]. All are worked on at once: the rows
    below are those of all tables, one after the other.
    """

    def __init__(self, tables: Sequence[NDArray[np.integer[Any]]]) -> None:
        self.sizes = np.array([len(table) for table in tables])
        self.digits = np.concatenate(tables).astype(np.int64)
        self.table = np.repeat(np.arange(len(tables)), self.sizes)
        self.first = np.cumsum(self.sizes) - self.sizes
        self.base = int(self.digits.max(initial=0)) + 1
        self.names = [self.table]
        for column in self.digits.T:
            # Numbered anew on each axis, so that no name outgrows the number of rows.
            names = self.names[-1] * self.base + column
            self.names.append(np.unique(names, return_inverse=True)[1].reshape(-1))

    def standing(self, length: int) -> list[Indices]:
        """Return for each table the choices that stand for its prefixes of this length.

        Choices of equal digits, as with a copy on the host, stand for a prefix together.
        """
        prefix = self.names[length]
        later = self.digits[:, length:]
        own = self.digits[:, length - 1, None]
        steps = np.where(later == own, 0, np.where(later == 0, 1, UNLIKE)).sum(axis=1)
        # The sort is stable: of equally like choices the first one stands for the prefix, and so
        # equal operators of different tables agree.
        order = np.lexsort((steps, prefix))
        ordered = prefix[order]
        firsts = order[np.flatnonzero(np.diff(ordered, prepend=-1))]
        whole = self.names[-1]
        standing = np.zeros(int(whole.max(initial=0)) + 1, dtype=bool)
        standing[whole[firsts]] = True
        rows = np.flatnonzero(standing[whole])
        parts = np.split(rows, np.searchsorted(rows, self.first[1:]))
        return [part - first for part, first in zip(parts, self.first, strict=True)]

    def longer(self, table: int, choices: Indices, standing: Indices, length: int) -> Indices:
        """Return those of the `standing` choices whose shorter prefix one of `choices` has.

        `length`: of the shorter prefix.
        """
        # Names of one table are close to each other, so that a mask is shorter than a search.
        names = self.names[length][self.first[table] : self.first[table] + self.sizes[table]]
        least = int(names.min())
        wanted = np.zeros(int(names.max() - least) + 1, dtype=bool)
        wanted[names[choices] - least] = True
        return standing[wanted[names[standing] - least]]
