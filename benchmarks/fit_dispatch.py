"""Fits the kernels of `benchmarks/validating/summed/dispatch.py` to measured ones of DeepEP.

`--data DIR` holds files moe_a2a_DEVICE.csv.gz with the columns nodes, gpus, tokens_per_rank,
hidden, topk, experts, sms, dispatch_s, combine_s (and _notify_s), trap. Constants of one node are
fitted to all devices with nodes of 8, and judged on each device by those fitted to the others.
Constants across nodes come from 2 and 4 nodes; on 8 nodes the same machine's network is a third as
fast, which is no property of the kernels. The formulas are those of `dispatch.py`; dispatch is in 8
bits with a scale for 128 elements, combine in 16.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.sharding.communication import domains_of_a_token
from benchmarks.validating.summed.dispatch import LINK, NETWORK

Floats = NDArray[np.float64]
LINKS: Mapping[str, float] = {
    "h100_sxm": 4.5e11,
    "h200_sxm": 4.5e11,
    "b200_sxm": 9e11,
    "b300_sxm": 9e11,
}
"""B/s one way of a device's inner link, of devices in nodes of 8 (data sheets)."""
PORT = 5e10
"""B/s of a port between nodes, assumed of the machine that was measured across nodes."""
LEAST_SMS = 8
ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Calls of one kernel: what their seconds are linear in, and the seconds that a link needs.

    `terms` [calls, 3]: token, once and copy, or (across nodes) forward alone.
    """

    terms: Floats
    wire: Floats
    seconds: Floats

    def predicted(self, constants: Floats) -> Floats:
        """Seconds by the overhead and the factors of the terms."""
        return np.asarray(constants[0] + np.maximum(self.terms @ constants[1:], self.wire))

    def errors(self, constants: Floats) -> Floats:
        """Errors as fractions."""
        return np.asarray(self.predicted(constants) / self.seconds - 1.0)


def fitted(calls: Sequence[Measured]) -> Floats:
    """Return the overhead and the factors of the least relative error.

    A call that waits for the link says nothing of the factors; which ones do is found in rounds.
    """
    constants: Floats | None = None
    for _ in range(ROUNDS):
        rows = []
        for one in calls:
            bound = np.zeros(len(one.seconds), dtype=bool)
            if constants is not None:
                bound = one.terms @ constants[1:] < one.wire
            whole = np.column_stack([np.ones(len(one.seconds)), one.terms])
            rows.append((whole / one.seconds[:, None])[~bound])
        matrix = np.vstack(rows)
        scale = matrix.max(axis=0)
        solution, _ = nnls(matrix / scale, np.ones(len(matrix)))
        constants = np.asarray(solution / scale)
    assert constants is not None, "there are rounds"
    return constants


def measured(rows: Sequence[Mapping[str, str]], way: str, link: float) -> Measured:
    """The calls of a way, `dispatch` or `combine`, in rows of as many nodes."""
    terms = []
    wire = []
    seconds = []
    for row in rows:
        tokens, hidden, top_k, experts, gpus, nodes, sms = (
            int(row[name])
            for name in ("tokens_per_rank", "hidden", "topk", "experts", "gpus", "nodes", "sms")
        )
        nbytes = hidden * (2.0 if way == "combine" else 1.0 + 4 / 128)
        ranks = domains_of_a_token(experts, top_k, gpus)
        sent = tokens * nbytes
        if nodes > 1:
            reached = domains_of_a_token(experts, top_k, nodes)
            terms.append([sent * ranks / sms])
            wire.append(sent * reached * (nodes - 1) / nodes / (NETWORK * PORT))
        else:
            terms.append([tokens / sms, sent / sms, sent * ranks / sms])
            wire.append(sent * ranks * (gpus - 1) / gpus / (LINK * link))
        seconds.append(float(row[f"{way}_s"]) + float(row.get(f"{way}_notify_s") or 0.0))
    return Measured(terms=np.array(terms), wire=np.array(wire), seconds=np.array(seconds))


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file with enough multiprocessors."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["sms"]) >= LEAST_SMS]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args().data
    files = {name: read(folder / f"moe_a2a_{name}.csv.gz") for name in LINKS}
    for way in ("dispatch", "combine"):
        nodes = {
            name: measured(
                [row for row in rows if row["nodes"] == "1" and not row["trap"]], way, LINKS[name]
            )
            for name, rows in files.items()
        }
        overhead, token, once, copy = fitted(list(nodes.values()))
        rates = [1 / factor if factor else float("inf") for factor in (once, copy)]
        print(f"{way}: overhead {overhead:.2g}, token {token:.2g}, once {rates[0]:.3g}, ", end="")
        print(f"copy {rates[1]:.3g}")
        for name, own in nodes.items():
            others = fitted([one for other, one in nodes.items() if other != name])
            print(f"  {name}: off {np.abs(own.errors(others)).mean():.1%} by the others' constants")
        far = [row for row in files["h100_sxm"] if row["nodes"] in ("2", "4")]
        across = measured(far, way, LINKS["h100_sxm"])
        overhead, forward = fitted([across])
        error = np.abs(across.errors(np.array([overhead, forward]))).mean()
        print(f"  between nodes: across {overhead:.2g}, forward {1 / forward:.3g}, off {error:.1%}")


if __name__ == "__main__":
    main()
