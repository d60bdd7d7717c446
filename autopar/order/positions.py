"""The longest path over positions: seconds of a step with passes in turns on unequal stages.

The k-th forward pass of stage s after its warm-up, and its k-th backward pass, have position k:
F(s, k) leads to F(s+1, k+1) and B(s, k); B(s, k) leads to F(s, k+1) and B(s-1, k). A path that is
on stage s(k) at position k moves down one stage per position, or up any number. The backward passes
on the way up telescope, so the length of the path is the sum over k of c(s(k)), where c = f + b,
plus 2 e (e: a send) for every step down. The warm-up before and the cool-down after it each add (p
- 1 - s) times the longest f or b so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def longest_path(
    forward: Floats, backward: Floats, weight: Floats, send: Floats, micro_batches: int
) -> float:
    """The length of the longest path, with sends and with late weight gradients.

    A weight gradient w is added where a path does not move down.

    At position k stage s computes the weight gradient of micro-batch k - s, so its first s
    positions have none and s weight gradients remain at the end.
    """
    stages = len(forward)
    # Positions presuppose that every stage reaches its turns of forward and backward passes.
    if micro_batches < stages:
        return _few_micro_batches(forward, backward, weight, send, micro_batches)
    own = forward + backward
    down = 2 * send[:-1]
    number = np.arange(stages)
    rest = number[::-1]
    path = np.cumsum(own) + rest * np.maximum.accumulate(forward)
    path[1:] += np.cumsum(down)
    before = micro_batches - stages  # the position up to which stage 0 has forward passes
    path = _advance(path, own, weight, down, before)
    late = bool(weight.any())
    holds = np.maximum.accumulate(backward)
    ends = np.arange(1, stages + 1) * weight - np.concatenate(
        ([0.0], np.cumsum(backward[:-1] + send[:-1]))
    )
    best = 0.0
    for bottom in range(stages):  # the stage whose forward passes end at this position
        tail = float(rest[bottom] * holds[bottom])
        if late:  # the step may end with the weight gradients of any stage above
            hold = np.maximum.accumulate((backward + weight)[bottom::-1])[::-1]
            tail = float((rest[bottom] * hold + ends[: bottom + 1]).max())
        best = max(best, float(path[bottom:].max()) + tail)
        path = advance(
            path, own, np.where(number <= before + bottom, weight, 0.0) if late else weight, down
        )
        path[: bottom + 1] = -np.inf
    return best


def advance(path: Floats, own: Floats, weight: Floats, down: Floats) -> Floats:
    """The longest paths that end one position later.

    They come from the stage above, from the same stage, or from one below.
    """
    following = np.maximum.accumulate(path[::-1])[::-1] + weight
    np.maximum(following[1:], path[:-1] + down, out=following[1:])
    following += own
    return following


def _advance(path: Floats, own: Floats, weight: Floats, down: Floats, positions: int) -> Floats:
    """Advance the paths by `positions` steps.

    Once all paths grow equally over the length of the critical cycle, they do so for ever (max-plus
    periodicity), and the remaining periods are added at once.
    """
    stages = len(own)
    number = np.arange(stages)
    late = bool(weight.any())
    done = 0
    before = path
    period = _critical_length(own, weight, down) if positions > stages else positions + 1
    while done < positions:
        path = advance(
            path,
            own,
            weight if done >= stages or not late else np.where(number <= done, weight, 0.0),
            down,
        )
        done += 1
        # Looking once a period suffices, and rounding must not be taken for a difference.
        if done % period == 0:
            grown = path - before
            if done - period >= stages and grown.max() - grown.min() <= 1e-13 * path.max():
                path = path + grown * ((positions - done) // period)
                done = positions - (positions - done) % period
            before = path
    return path


def _critical_length(own: Floats, weight: Floats, down: Floats) -> int:
    """Positions of the cycle with the largest mean.

    A cycle goes down from stage a to b, one stage a position, and back up at once.
    """
    stages = len(own)
    total = np.concatenate(([0.0], np.cumsum(own)))
    sent = np.concatenate(([0.0], np.cumsum(down)))
    length = np.arange(1, stages + 1)[None, :] - np.arange(stages)[:, None]
    gain = (total[None, 1:] - total[:-1, None]) + (sent[None, :] - sent[:, None]) + weight[:, None]
    mean = np.where(length > 0, gain / np.maximum(length, 1), -np.inf)
    return int(length.flat[int(mean.argmax())])


def _few_micro_batches(
    forward: Floats, backward: Floats, weight: Floats, send: Floats, micro_batches: int
) -> float:
    """The length with fewer micro-batches than stages, from every pass, by positions."""
    f = forward.tolist()
    b = backward.tolist()
    w = weight.tolist()
    e = send.tolist()
    stages = len(f)
    free = [0.0] * stages
    ahead = [0.0] * stages
    for position in range(1 - stages, micro_batches):
        # From the last stage up, so that `ahead[s - 1]` is still that of the position before.
        for s in range(stages - 1, -1, -1):
            if 0 <= position + stages - 1 - s < micro_batches:
                arrived = ahead[s - 1] + e[s - 1] if s else 0.0
                free[s] = ahead[s] = max(free[s], arrived) + f[s]
        arrived = 0.0
        for s in range(stages - 1, -1, -1) if position >= 0 else ():
            end = max(free[s], arrived) + b[s]
            # On stage 0 this is the last stage's send, which nothing reads any more.
            arrived = end + e[s - 1]
            free[s] = end + (w[s] if position >= s else 0.0)
    # Every stage still owes the weight gradients that it put off.
    return float(max(free[s] + min(s, micro_batches) * w[s] for s in range(stages)))
