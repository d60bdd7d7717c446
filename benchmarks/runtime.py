"""Steps of autopar and of torch's own means, on the same forked ranks: seconds and memory.

    benchmarks/runtime.py [--quick] [--json] [--rivals ddp fsdp2 ...] [--ranks 2 4] [--widths 512
    128] [--rounds N]
                          [--no-memory]

GPT-2 or Llama (`--model`) in plain torch, AdamW, float32, Gloo, one thread a rank. Each rival runs
beside the plan that does the same:

    ddp, fsdp2, fsdp2-kept     data parallel; ZeRO-3 (parameters let go after the forward pass);
                               ZeRO-2 (kept)
    dtensor                    `parallelize_module`: tensor parallel
    torch-gpipe, torch-1f1b    `torch.distributed.pipelining`, a stage a rank
    one-rank                   the model without a plan on one of the ranks, the others waiting

Steps are taken in turn; ratio = ours / rival, the median of the rounds. Losses are compared in
every step. At width 512 computation dominates, at width 128 the rest does. Memory is the highest
resident memory during a step (`benchmarks/running/races.py`). Bubbles: the share of the passes that
stages wait, measured by the processor time of their threads, and priced by the plan.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import unknown
from benchmarks.running.bubbles import Bubble, bubble
from benchmarks.running.contenders import MICRO_BATCHES, RIVALS
from benchmarks.running.gpt2 import Shape
from benchmarks.running.models import FAMILIES
from benchmarks.running.races import LeftOut, Row, race

SHAPES = {512: Shape(width=512, layers=4), 128: Shape(width=128, layers=2)}
"""By width."""
ROUNDS = 15
QUICK_ROUNDS = 3
QUICK_WIDE = ("ddp",)
"""The rivals that a quick run races at the larger width, too."""
CLOSE = 1e-4
"""Losses of float32 that are further apart are not of one training."""
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


def rows(chosen: argparse.Namespace, rounds: int) -> Iterator[Row | LeftOut]:
    """Every race."""
    for width in chosen.widths:
        for count in chosen.ranks or ((2,) if chosen.quick else (2, 4)):
            for rival in chosen.rivals:
                if not chosen.quick or width == min(chosen.widths) or rival in QUICK_WIDE:
                    yield race(
                        rival, shape_of(chosen, width), count, rounds, memory=not chosen.no_memory
                    )


def shape_of(chosen: argparse.Namespace, width: int) -> Shape:
    """The sizes of a race."""
    shape = replace(SHAPES[width], family=chosen.model)
    return shape if chosen.layers is None else replace(shape, layers=chosen.layers)


def bubbles(widths: Sequence[int], rounds: int, quick: bool) -> Iterator[Bubble | LeftOut]:
    """Two stages: more than the machine has cores would wait for these."""
    for schedule in SCHEDULES[: 2 if quick else None]:
        for micro_batches in (MICRO_BATCHES,) if quick else (2, MICRO_BATCHES):
            yield bubble(
                schedule, SHAPES[min(widths) if quick else max(widths)], 2, micro_batches, rounds
            )


def show(row: Row | LeftOut | Bubble) -> None:
    """One line."""
    if isinstance(row, Bubble):
        which = f"{row.schedule}, {row.stages} stages, {row.micro_batches} micro-batches"
        print(f"bubble of {which}: {row.measured:.1%}, priced {row.priced:.1%}", flush=True)
    elif isinstance(row, LeftOut):
        print(
            f"{row.scheme:15} {row.rival:12} {row.ranks:5} {row.width:5}  left out: {row.why}",
            flush=True,
        )
    else:
        memory = "-" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
        megabytes = "" if row.ours_mb is None else f"{row.ours_mb:8.1f} {row.rival_mb:8.1f}"
        apart = "" if row.loss_error <= CLOSE else f"  losses differ by {row.loss_error:.1g}"
        times = f"{row.ours_s * 1e3:9.1f} {row.rival_s * 1e3:9.1f} {row.ratio:6.2f}"
        print(
            f"{row.scheme:15} {row.rival:12} {row.ranks:5} {row.width:5} {times} {memory:>7} "
            f"{megabytes}{apart}",
            flush=True,
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 ranks, few rounds, most rivals at the smaller width only: within a minute",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="gpt2", choices=FAMILIES, help="default: gpt2")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model")
    parser.add_argument(
        "--rivals",
        nargs="+",
        default=list(RIVALS),
        metavar="NAME",
        help=f"of {', '.join(RIVALS)} (default: all)",
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=None,
        metavar="N",
        help="numbers of ranks (default: 2 and 4)",
    )
    parser.add_argument(
        "--widths",
        nargs="+",
        type=int,
        default=list(SHAPES),
        choices=SHAPES,
        help="widths of the model (default: both)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=None,
        metavar="N",
        help=f"timed steps (default: {ROUNDS}, quick {QUICK_ROUNDS})",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave memory out")
    parser.add_argument(
        "--no-bubbles", action="store_true", help="leave the bubbles of pipelines out"
    )
    options = parser.parse_args(arguments)
    for name in options.rivals:
        if name not in RIVALS:
            parser.error(unknown("rival", name, RIVALS))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    warnings.filterwarnings("ignore")
    chosen = parsed(arguments)
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    if not chosen.json:
        heads = (
            f"{'ours ms':>9} {'rival ms':>9} {'ratio':>6} {'memory':>7} {'ours MB':>8} "
            f"{'rival MB':>8}"
        )
        print(f"{'scheme':15} {'rival':12} {'ranks':>5} {'width':>5} {heads}")
    told: list[Row | LeftOut] = []
    for row in rows(chosen, rounds):
        told.append(row)
        if not chosen.json:
            show(row)
    waits: list[Bubble | LeftOut] = []
    for wait in () if chosen.no_bubbles else bubbles(chosen.widths, rounds, chosen.quick):
        waits.append(wait)
        if not chosen.json:
            show(wait)
    if chosen.json:
        written = {
            "rows": [row.as_json() for row in told if isinstance(row, Row)],
            "bubbles": [wait.as_json() for wait in waits if isinstance(wait, Bubble)],
            "left_out": [asdict(row) for row in (*told, *waits) if isinstance(row, LeftOut)],
        }
        print(json.dumps(written))


if __name__ == "__main__":
    main()
