"""Hostile input led by coverage.

Inputs that reach new lines of a reader are mutated further, by atheris.

    benchmarks/fuzzing_guided.py KIND [--file NAME] [options of libFuzzer: -max_total_time=600,
    -seed=1, -runs=10000]

Needs `pip install atheris`. Kinds, files and requirements are those of `benchmarks/fuzzing.py`; the
first input is the kind's seed. A fault stops the run, and libFuzzer writes it to `crash-...` in the
current folder.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Found(Exception):
    """An input that autopar does not read as it should."""


def target(kind: str, file: str, folder: Path) -> Callable[[bytes], None]:
    """A function that reads bytes as a file of the kind, in a folder that holds the seeds.

    It raises `Found`.
    """
    from benchmarks.fuzzing import read

    def one(data: bytes) -> None:
        (folder / file).write_bytes(data)
        row = read(kind, folder, file, random.Random(0))
        if row["why"]:
            raise Found(row["why"])

    return one


def main() -> None:
    """Fuzz until libFuzzer's options end it."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    with atheris.instrument_imports(include=["autopar"]):
        from benchmarks.fuzz.kinds import KINDS, seeds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("--file", help="which of the kind's files (default: the first)")
    args, options = parser.parse_known_args()
    file = args.file or KINDS[args.kind].files[0]
    if file not in KINDS[args.kind].files:
        parser.error(f"--file: {file!r} is none of {', '.join(KINDS[args.kind].files)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "in"
        corpus = Path(scratch) / "corpus"
        seeds(folder)
        corpus.mkdir()
        (corpus / "seed").write_bytes((folder / file).read_bytes())
        atheris.Setup([sys.argv[0], *options, str(corpus)], target(args.kind, file, folder))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
