"""The patterns that algorithms of collectives are made of: rounds in which ranks of one line
exchange what each of them holds.

`ranks` are the members, the first is the root; `held[i]` are the chunks that belong to the member
at place i.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.costmodel.collectives.schedules.schedule import Chunks, Message, Round, message, together

Ranks = Sequence[int]
Held = Sequence[Chunks]


def joined(held: Held) -> Chunks:
    """All chunks of some places."""
    return tuple(itertools.chain(*held))


def log2_up(n: int) -> int:
    """The rounds in which something that doubles reaches n."""
    return (n - 1).bit_length()


def ring_gather(ranks: Ranks, held: Held) -> list[Round]:
    """In round k every place passes on to the next what it got k rounds away: everybody gets
    everything.
    """
    n = len(ranks)
    return [
        tuple(message(ranks[i], ranks[(i + 1) % n], held[(i - k) % n]) for i in range(n))
        for k in range(n - 1)
    ]


def doubling_gather(ranks: Ranks, held: Held) -> list[Round]:
    """Each place sends all that it has as far back as it has chunks; what is left goes in the last
    round (Bruck et al. 1997, any n).
    """
    n = len(ranks)
    rounds = []
    for k in range(log2_up(n)):
        count = min(2**k, n - 2**k)
        rounds.append(
            tuple(
                message(
                    ranks[i],
                    ranks[(i - 2**k) % n],
                    joined([held[(i + j) % n] for j in range(count)]),
                )
                for i in range(n)
            )
        )
    return rounds


def linear_scatter(ranks: Ranks, held: Held) -> list[Round]:
    """The root sends each its own, one after the other."""
    return [(message(ranks[0], rank, own),) for rank, own in zip(ranks[1:], held[1:], strict=True)]


def direct_scatter(ranks: Ranks, held: Held) -> list[Round]:
    """The root sends to all at once."""
    return [
        tuple(message(ranks[0], rank, own) for rank, own in zip(ranks[1:], held[1:], strict=True))
    ]


def binomial_scatter(ranks: Ranks, held: Held) -> list[Round]:
    """The first place of a range sends the second half of it to the first place there; both halves
    go on.
    """
    n = len(ranks)
    if n < 2:
        return []
    middle = (n + 1) // 2
    first = [(message(ranks[0], ranks[middle], joined(held[middle:])),)]
    halves = together(
        binomial_scatter(ranks[:middle], held[:middle]),
        binomial_scatter(ranks[middle:], held[middle:]),
    )
    return [*first, *halves]


def linear_broadcast(ranks: Ranks, chunks: Chunks) -> list[Round]:
    """The root sends to each, one after the other."""
    return [(message(ranks[0], rank, chunks),) for rank in ranks[1:]]


def direct_broadcast(ranks: Ranks, chunks: Chunks) -> list[Round]:
    """The root sends to all at once."""
    return [tuple(message(ranks[0], rank, chunks) for rank in ranks[1:])]


def binomial_broadcast(ranks: Ranks, chunks: Chunks) -> list[Round]:
    """The ranks that have the message double in each round."""
    n = len(ranks)
    return [
        tuple(message(ranks[i], ranks[i + 2**k], chunks) for i in range(2**k) if i + 2**k < n)
        for k in range(log2_up(n))
    ]


def chain_broadcast(ranks: Ranks, chunks: Chunks) -> list[Round]:
    """Chunk by chunk from each place to the next."""
    hops = list(itertools.pairwise(ranks))
    return together(
        *(
            [()] * j + [(message(a, b, (chunk,)),) for a, b in hops]
            for j, chunk in enumerate(chunks)
        )
    )


def two_tree_broadcast(ranks: Ranks, chunks: Chunks) -> list[Round]:
    """Each half of the chunks down one of two binary trees; who is inside one is a leaf of the
    other (Sanders et al. 2009).

    Below the root, place i of a tree has children 2i and 2i + 1; the second tree numbers the ranks
    from behind.
    """
    root = ranks[0]
    others = list(ranks[1:])
    half = len(chunks) // 2
    phases = []
    for order, part in ((others, chunks[:half]), (others[::-1], chunks[half:])):
        levels: list[Round] = [(message(root, order[0], ()),)]
        for depth in range(1, len(order).bit_length()):
            levels.append(
                tuple(
                    message(order[i // 2 - 1], order[i - 1], ())
                    for i in range(2**depth, min(2 ** (depth + 1), len(order) + 1))
                )
            )
        phases += [
            [()] * j + [_loaded(level, (chunk,)) for level in levels]
            for j, chunk in enumerate(part)
        ]
    return together(*phases)


def _loaded(level: Round, chunks: Chunks) -> Round:
    return tuple(
        Message(source=one.source, destination=one.destination, chunks=chunks) for one in level
    )


def exchange(ranks: Ranks, blocks: dict[tuple[int, int], Chunks]) -> list[Round]:
    """In round k each place sends to the one k places on its block for it: `blocks` by (from, to)
    place.
    """
    n = len(ranks)
    return [
        tuple(message(ranks[i], ranks[(i + k) % n], blocks[i, (i + k) % n]) for i in range(n))
        for k in range(1, n)
    ]


def direct_exchange(ranks: Ranks, blocks: dict[tuple[int, int], Chunks]) -> list[Round]:
    """All blocks at once."""
    return [tuple(itertools.chain(*exchange(ranks, blocks)))]


def bruck_exchange(ranks: Ranks, blocks: dict[tuple[int, int], Chunks]) -> list[Round]:
    """A block that goes d places on travels the binary digits of d, all blocks with that digit
    together (Bruck et al. 1997).
    """
    n = len(ranks)
    rounds = []
    for k in range(log2_up(n)):
        moved = [d for d in range(n) if d >> k & 1]
        messages = []
        for i in range(n):
            # The block for a place d on from its source has come the lower digits of d already.
            sources = [((i - d % 2**k) % n, d) for d in moved]
            messages.append(
                message(
                    ranks[i],
                    ranks[(i + 2**k) % n],
                    joined([blocks[s, (s + d) % n] for s, d in sources]),
                )
            )
        rounds.append(tuple(messages))
    return rounds
