"""Hostile input: numbered mutants of seven kinds of file, and the results of reading them.

    benchmarks/fuzzing.py [--quick] [--json] [--kind NAME ...] [--count N] [--first N] [--keep DIR]

A mutant is made again from its kind and number: `--kind onnx --first 123 --count 1`. Reading it
must end within `SECONDS` and `BYTES` (resident, above the process's own), with the result asked
for, or with an exit code of autopar and one message without control characters. It must write
nothing else. A mutant that violates this is printed with its number, and written to `--keep`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.errors import AutoparError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECONDS = 10
BYTES = 2 * 2**30
TIMERS = (
    (signal.ITIMER_PROF, signal.SIGPROF, SECONDS),
    (signal.ITIMER_REAL, signal.SIGALRM, 12 * SECONDS),
)
"""The time of this process counts.

Clock time, which other processes affect, only if nothing happens at all.
"""
BATCH = 100
"""Mutants that one process reads."""
CODES = (2, 3, 4, 5, 6)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Hang(BaseException):
    """Reading took longer than it may."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """The results of a kind's mutants.

    Counts of exit codes, the slowest, the most memory, and the `faults`.
    """

    codes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    grown: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)


def fuzz(name: str, first: int, count: int, seeds: Path, keep: Path | None = None) -> Tally:
    """Read the mutants `first` to `first + count` of a kind, in processes of their own."""
    tally = Tally()
    at = first
    while at < first + count:
        stop = min(at + BATCH, first + count)
        for row in _batch(name, at, stop, seeds, keep):
            at = row["number"] + 1
            tally.codes[row["code"]] += 1
            tally.seconds = max(tally.seconds, row["seconds"])
            tally.grown = max(tally.grown, row["grown"])
            if row["why"]:
                tally.faults.append({key: row[key] for key in ("number", "file", "why")})
    return tally


def _batch(
    name: str, first: int, stop: int, seeds: Path, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """The rows of a process; one that dies is a finding, and the next begins after it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "w") as out:
                for number in range(first, stop):
                    print(json.dumps(_one(name, number, seeds, keep)), file=out, flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    last = first - 1
    with os.fdopen(read) as rows:
        for line in rows:
            row = json.loads(line)
            last = row["number"]
            yield row
    _, status = os.waitpid(pid, 0)
    if status:
        died = f"the process died: {status}"
        yield {
            "number": last + 1,
            "file": "",
            "code": "died",
            "seconds": 0.0,
            "grown": 0,
            "why": died,
        }


def _one(name: str, number: int, seeds: Path, keep: Path | None) -> dict[str, Any]:
    """The result of one mutant."""
    from benchmarks.fuzz.kinds import KINDS
    from benchmarks.fuzz.mutants import mutant

    chance = random.Random(f"{name} {number}")
    kind = KINDS[name]
    file = chance.choice(kind.files)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "in"
        shutil.copytree(seeds, folder)
        data = mutant(file, (folder / file).read_bytes(), chance)
        (folder / file).write_bytes(data)
        before = _listed(Path(scratch))
        row = read(name, folder, file, chance)
        wrote = _listed(Path(scratch)) - before - {"in/out"}
        row["why"] = row["why"] or (f"wrote {sorted(wrote)}" if wrote else "")
    if row["why"] and keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name}-{number}-{Path(file).name}").write_bytes(data)
    return {"number": number, "file": file, **row}


def _listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def read(name: str, folder: Path, file: str, chance: random.Random) -> dict[str, Any]:
    """Read the mutant as its kind is read, and judge."""
    from autopar.errors import AutoparError
    from benchmarks.fuzz.kinds import KINDS

    def late(*_: object) -> None:
        raise Hang

    said = io.StringIO()
    start = time.process_time()
    held = _peak()
    for timer, signalled, most in TIMERS:
        signal.signal(signalled, late)
        signal.setitimer(timer, most)
    code = "0"
    why = ""
    try:
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            KINDS[name].read(folder, file, chance)
    except AutoparError as error:
        code = str(error.exit_code)
        why = _objection(error)
    except SystemExit as error:
        code = str(error.code)
    except Hang:
        code = "hang"
        why = f"longer than {SECONDS} s"
    except BaseException as error:
        code = "crash"
        why = f"{type(error).__name__}: {str(error)[:200]!r} at {_place(error)}"
    finally:
        for timer, _, _ in TIMERS:
            signal.setitimer(timer, 0)
    seconds = time.process_time() - start
    grown = _peak() - held
    why = why or (f"{grown / 2**30:.1f} GiB" if grown > BYTES else "")
    why = why or (
        "a control character printed"
        if _CONTROL.search(said.getvalue().replace("\r", "").replace("\x1b[2K", ""))
        else ""
    )
    return {"code": code, "why": why, "seconds": seconds, "grown": grown}


def _objection(error: AutoparError) -> str:
    """The fault of a refusal, in words; "" if its exit code and its message are right."""
    from autopar.printable import printable

    message = printable(str(error))
    if error.exit_code not in CODES:
        return f"exit code {error.exit_code}"
    if not message.strip():
        return "an empty message"
    return "a control character" if _CONTROL.search(message) else ""


def _place(error: BaseException) -> str:
    """The last line of the product that an error came through, or the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if str(ROOT) in frame.filename and "benchmarks" not in frame.filename
    ]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the table."""
    from benchmarks.fuzz.kinds import KINDS, seeds

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="30 mutants of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--kind",
        action="append",
        choices=tuple(KINDS),
        help="one of the kinds; repeatable (default: all)",
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="mutants of each kind (default: 1000)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--keep", type=Path, help="folder for the mutants that broke a rule")
    args = parser.parse_args()
    count = 30 if args.quick else args.count
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "seeds"
        seeds(made)
        for name in args.kind or KINDS:
            tally = fuzz(name, args.first, count, made, args.keep)
            rows[name] = {
                "mutants": count,
                "codes": dict(sorted(tally.codes.items())),
                "slowest_s": tally.seconds,
                "grown_mib": tally.grown / 2**20,
                "faults": tally.faults,
            }
            if not args.json:
                codes = ", ".join(f"{code}: {n}" for code, n in sorted(tally.codes.items()))
                print(
                    f"{name:12} {count:6} mutants  {codes:50}  slowest {tally.seconds:.1f} s, most "
                    f"{tally.grown / 2**20:.0f} MiB more"
                )
                for fault in tally.faults:
                    print(f"    {fault['number']} {fault['file']}: {fault['why']}")
                sys.stdout.flush()
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
