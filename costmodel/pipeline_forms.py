"""Closed forms for the seconds of a pipelined step, for stages of unequal times; the simulation of `pipeline_simulation` agrees.

With p stages, m micro-batches, f and b the seconds of one micro-batch forward and backward (with the weight gradient w), e per send:

gpipe, 1f1b    (m + p - 1) (f + b)                      equal stages, no sends              (arXiv:2104.04473, section 2.2.1)
interleaved    m (f + b) + (p - 1) (f + b) / v          v chunks a stage                    (arXiv:2104.04473, section 2.2.2)
zero_bubble    m (f + b) + (p - 1) (f + b - 2 w)        where w <= f and w <= b / 2          (ZB-H1: arXiv:2401.10241, table 1)

For unequal stages a step is a longest path. In 1F1B give the k-th forward pass of stage s after its warm-up, and its k-th backward pass,
the position k: F(s, k) leads to F(s+1, k+1) and B(s, k); B(s, k) leads to F(s, k+1) and B(s-1, k). A path that is on stage s(k) at position
k moves down one stage a position, or up any number, and the backward passes on the way up telescope: its length is the sum over k of
c(s(k)), where c = f + b, plus 2 e for every step down; the warm-up before and the cool-down after it add (p - 1 - s) times the longest f or
b up to there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def gpipe_seconds(forward: Floats, backward: Floats, send: Floats, micro_batches: int) -> float:
    """Two flow shops of equal jobs, one after the other: the sum over the stages and m - 1 times the slowest. Exact."""
    once = forward.sum() + backward.sum() + 2 * send[:-1].sum()
    return float(once + (micro_batches - 1) * (forward.max() + backward.max()))


def one_f_one_b_seconds(forward: Floats, backward: Floats, send: Floats, micro_batches: int) -> float:
    """The longest path over positions. Exact."""
    stages = len(forward)
    if micro_batches >= 2 * stages and not send[:-1].any():
        return _without_sends(forward, backward, micro_batches)
    return _position_path(forward, backward, np.zeros(stages), send, micro_batches)


def _without_sends(forward: Floats, backward: Floats, micro_batches: int) -> float:
    """A path stays on one stage h but at its ends, where it may come up from, or go down to, a stage below."""
    both = forward + backward
    total = np.cumsum(both)
    number = np.arange(len(both))
    rest = number[::-1]
    ahead = np.maximum.accumulate((total + rest * np.maximum.accumulate(forward))[::-1])[::-1]
    back = np.maximum.accumulate((total + rest * np.maximum.accumulate(backward))[::-1])[::-1]
    return float((ahead + back - total + (micro_batches - len(both) + number) * both).max())


def zero_bubble_seconds(forward: Floats, backward: Floats, weight: Floats, send: Floats, micro_batches: int) -> float:
    """The longest path over positions; `backward` is without `weight`. Exact."""
    return _position_path(forward, backward, weight, send, micro_batches)


def _position_path(forward: Floats, backward: Floats, weight: Floats, send: Floats, micro_batches: int) -> float:
    """The longest path where sends take time or weight gradients come later: w is added where a path does not move down.

    Stage s runs at position k the weight gradient of micro-batch k - s, so that the first s positions have none and s are left at the end.
    """
    stages = len(forward)
    if micro_batches < stages:
        return _few_micro_batches(forward, backward, weight, send, micro_batches)
    own, down = forward + backward, 2 * send[:-1]
    number = np.arange(stages)
    rest = number[::-1]
    path = np.cumsum(own) + rest * np.maximum.accumulate(forward)
    path[1:] += np.cumsum(down)
    before = micro_batches - stages  # the position up to which stage 0 has forward passes
    path = _advance(path, own, weight, down, before)
    late = bool(weight.any())
    holds = np.maximum.accumulate(backward)
    ends = np.arange(1, stages + 1) * weight - np.concatenate(([0.0], np.cumsum(backward[:-1] + send[:-1])))
    best = 0.0
    for bottom in range(stages):  # the stage whose forward passes end at this position
        tail = float(rest[bottom] * holds[bottom])
        if late:  # the step may end with the weight gradients of any stage above
            hold = np.maximum.accumulate((backward + weight)[bottom::-1])[::-1]
            tail = float((rest[bottom] * hold + ends[: bottom + 1]).max())
        best = max(best, float(path[bottom:].max()) + tail)
        path = _step(path, own, np.where(number <= before + bottom, weight, 0.0) if late else weight, down)
        path[: bottom + 1] = -np.inf
    return best


def _step(path: Floats, own: Floats, weight: Floats, down: Floats) -> Floats:
    """The longest paths that end one position later: from the stage above, from the same stage, or from one below."""
    found = np.maximum.accumulate(path[::-1])[::-1] + weight
    np.maximum(found[1:], path[:-1] + down, out=found[1:])
    found += own
    return found


def _advance(path: Floats, own: Floats, weight: Floats, down: Floats, positions: int) -> Floats:
    """`positions` steps; once the paths grow alike over the length of the critical cycle, they do so for ever (max-plus periodicity)."""
    stages = len(own)
    number = np.arange(stages)
    late = bool(weight.any())
    done, before = 0, path
    period = _critical_length(own, weight, down) if positions > stages else positions + 1
    while done < positions:
        path = _step(path, own, weight if done >= stages or not late else np.where(number <= done, weight, 0.0), down)
        done += 1
        if done % period == 0:
            grown = path - before
            if done - period >= stages and grown.max() - grown.min() <= 1e-13 * path.max():
                path = path + grown * ((positions - done) // period)
                done = positions - (positions - done) % period
            before = path
    return path


def _critical_length(own: Floats, weight: Floats, down: Floats) -> int:
    """Positions of the cycle with the largest mean: down from stage a to stage b, one a position, and back up to a at once."""
    stages = len(own)
    total = np.concatenate(([0.0], np.cumsum(own)))
    sent = np.concatenate(([0.0], np.cumsum(down)))
    length = np.arange(1, stages + 1)[None, :] - np.arange(stages)[:, None]
    gain = (total[None, 1:] - total[:-1, None]) + (sent[None, :] - sent[:, None]) + weight[:, None]
    mean = np.where(length > 0, gain / np.maximum(length, 1), -np.inf)
    return int(length.flat[int(mean.argmax())])


def _few_micro_batches(forward: Floats, backward: Floats, weight: Floats, send: Floats, micro_batches: int) -> float:
    """Fewer micro-batches than stages: every pass, by positions."""
    f, b, w, e = forward.tolist(), backward.tolist(), weight.tolist(), send.tolist()
    stages = len(f)
    free = [0.0] * stages
    ahead = [0.0] * stages
    for position in range(1 - stages, micro_batches):
        for s in range(stages - 1, -1, -1):
            if 0 <= position + stages - 1 - s < micro_batches:
                arrived = ahead[s - 1] + e[s - 1] if s else 0.0
                free[s] = ahead[s] = max(free[s], arrived) + f[s]
        arrived = 0.0
        for s in range(stages - 1, -1, -1) if position >= 0 else ():
            end = max(free[s], arrived) + b[s]
            arrived = end + e[s - 1]
            free[s] = end + (w[s] if position >= s else 0.0)
    return float(max(free[s] + min(s, micro_batches) * w[s] for s in range(stages)))


def interleaved_seconds(
    forward: Floats, backward: Floats, send: Floats, micro_batches: int, interleave: int, held: tuple[Floats, Floats]
) -> float:
    """The longest path among those that work on one stage h all the time but for both ends; exact for equal stages with short sends.

    With positions as in 1F1B a step down takes two of them, so that no path gains by one in the middle; what enters stage h, or leaves it,
    is one of `_entries`. `held`: the forward and backward seconds of a stage that works all the time, with the sends that it stands still
    for.
    """
    p, m, v = len(forward), micro_batches, interleave
    f, b = forward / v, backward / v
    busy_f, busy_b = held[0] / v, held[1] / v
    hold = busy_f + busy_b
    warm = np.minimum(2 * np.arange(p - 1, -1, -1) + (v - 1) * p, m * v)
    turns = m * v - warm
    around = v > 1 and m >= 2 * p  # the last stage passes a later micro-batch on to the first one's next chunk
    enter = _entries(f, b, send, warm, v, busy_f, hold, around)
    leave = _entries(b, f, send, warm, v, busy_b, hold, around)
    best = 0.0
    for before, spent in enter:
        for after, left in leave:
            rest = turns - spent - left
            best = max(best, float(np.where(rest >= 0, before + rest * hold + after, 0.0).max()))
    return best


def _entries(
    ahead: Floats, back: Floats, send: Floats, warm: NDArray[np.int64], chunks: int, busy: Floats, hold: Floats, around: bool
) -> list[tuple[Floats, NDArray[np.int64]]]:
    """The longest paths from the start to every stage, and how many of its turns they spend: the ends are the same in reverse.

    - straight: in the warm-up a path goes down once and stays on the slowest stage on its way, or through up to all chunks, p passes each;
    - by way of a stage below: it comes up with the first backward passes, in the first turn;
    - around: it takes p turns on the last stage and goes on with the next chunk from the first stage down.
    """
    stages = len(ahead)
    number = np.arange(stages)
    above = np.concatenate(([0.0], np.cumsum(ahead[:-1] + send[:-1])))
    straight: Floats = np.asarray(above + warm * np.maximum.accumulate(busy), dtype=np.float64)
    for ring in {1, chunks - 1} - {0}:
        rest = warm - ring * stages
        through = above + ring * float(ahead.sum() + send.sum()) + rest * busy.max()
        straight = np.where(rest >= 0, np.maximum(straight, through), straight)
    climbed = np.cumsum(back) + np.concatenate(([0.0], np.cumsum(send[:-1])))
    below = np.maximum.accumulate((straight + ahead + climbed)[::-1])[::-1] - climbed + back
    found = [(straight, 0 * number), (below, 0 * number + 1)]
    if around:
        wrap = float(straight[-1] + stages * hold[-1] + ahead[-1] + send[-1])
        found.append((wrap + above, 2 * number + 2))
    return found
