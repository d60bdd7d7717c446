"""Proves the sharding rules of ONNX's operators by their node tests: `python -m
tests.sharding.onnx_proof [FILE]`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch

from autopar.errors import AutoparError
from autopar.runtime.proof import Execution, Sample, decisions
from autopar.sharding.program import Decision
from autopar.sharding.rules import RULES
from tests.frontends.onnx.lowering.node_report import known_reason
from tests.frontends.onnx.lowering.node_tests import NodeTest, node_tests
from tests.sharding.onnx_extra import extra
from tests.sharding.onnx_ranks import NotSplit, Split, split, wrong_on_two_ranks
from tests.sharding.onnx_samples import alone, grown, load

FILE = Path(__file__).parents[2] / "docs" / "proof-onnx.json"
MESHES = ((2,), (3,), (2, 2))


@dataclass(slots=True)
class Tally:
    """The counts for one operator kind.

    `rule`: the line of its first sample; `samples`: calls that were executed; `strategies`: how
    many were compared with the whole, `split` of them with a split; `refused`: samples that torch
    cannot execute alone, with the reason; `failures`: what was not equal.
    """

    samples: int = 0
    strategies: int = 0
    split: int = 0
    rule: str = ""
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def counted() -> list[NodeTest]:
    """The node tests that count."""
    return [test for test in node_tests() if test.left_out is None]


def extra_samples() -> Iterable[tuple[Sample, bool]]:
    """The calls that node tests lack, as they are and grown."""
    for sample in extra():
        yield sample, True
        larger = grown(sample)
        if larger is not None:
            yield larger, True


def samples_of(tests: Iterable[NodeTest]) -> Iterable[tuple[Sample, bool]]:
    """Each single operator with a rule, as it is and grown, and whether it is the first with its
    shapes and attributes.
    """
    seen: set[str] = set()
    for test in tests:
        try:
            loaded = load(test)
        except AutoparError:
            continue
        sample = alone(loaded, test.name)
        if sample is None or sample.kind not in RULES:
            continue
        fresh = sample.graph.operator_fingerprint(sample.operator) not in seen
        seen.add(sample.graph.operator_fingerprint(sample.operator))
        yield sample, fresh
        larger = grown(sample) if fresh else None
        if larger is not None:
            yield larger, True


def is_split(decision: Decision, mesh: Sequence[int]) -> bool:
    """Whether some axis of several devices splits a factor."""
    return any(
        option.factor >= 0 and size > 1 for option, size in zip(decision.options, mesh, strict=True)
    )


def prove_all(sample: Sample, meshes: Sequence[tuple[int, ...]], tally: Tally) -> None:
    """Compare every strategy of a sample on every mesh with the whole."""
    try:
        whole = Execution(sample)
    except NotImplementedError as error:
        tally.refused.append(f"{sample.note}: {error}")
        return
    tally.samples += 1
    for mesh in meshes:
        for decision in decisions(sample, mesh):
            tally.strategies += 1
            tally.split += is_split(decision, mesh)
            tally.rule = tally.rule or (decision.rule.text if decision.rule else "")
            try:
                whole.check(decision, mesh)
            except Exception as error:  # whatever goes wrong is the finding
                names = " ".join(option.name for option in decision.options)
                tally.failures.append(
                    f"{sample.note} on {mesh}, {names}: {' '.join(str(error).split())[:200]}"
                )


def prove_kinds(tests: Iterable[NodeTest]) -> dict[str, Tally]:
    """The counts for every kind; meshes of two axes are left to one sample of each shape and
    attributes.
    """
    results: dict[str, Tally] = {}
    for sample, fresh in itertools.chain(samples_of(tests), extra_samples()):
        prove_all(sample, MESHES if fresh else MESHES[:2], results.setdefault(sample.kind, Tally()))
    return results


def splits(tests: Iterable[NodeTest]) -> tuple[list[Split], dict[str, str]]:
    """The tests that can be split over two ranks, and the others with the reason."""
    results = []
    others = {}
    for test in tests:
        try:
            results.append(split(test))
        except (NotSplit, AutoparError) as error:
            others[test.name] = str(error)[:200]
    return results, others


def report() -> dict[str, object]:
    """Everything that is proved, and what is not."""
    tests = counted()
    tallies = prove_kinds(tests)
    chosen, others = splits(tests)
    wrong = wrong_on_two_ranks(chosen)
    kinds = {
        kind: {
            "rule": t.rule,
            "samples": t.samples,
            "strategies": t.strategies,
            "split": t.split,
            "refused": t.refused,
            "failures": t.failures,
        }
        for kind, t in sorted(tallies.items())
    }
    totals = {
        name: sum(getattr(t, name) for t in tallies.values())
        for name in ("samples", "strategies", "split")
    }
    totals |= {
        name: sum(len(getattr(t, name)) for t in tallies.values())
        for name in ("refused", "failures")
    }
    whys = Counter(others.values())
    return {
        "onnx": onnx.__version__,
        "torch": torch.__version__,
        "meshes": [list(mesh) for mesh in MESHES],
        "kinds": len(kinds),
        "kinds_with_a_split": sum(t.split > 0 for t in tallies.values()),
        **totals,
        "without_a_split": sorted(kind for kind, t in tallies.items() if not t.split),
        "operators": kinds,
        "two_ranks": {
            "counted": len(tests),
            "splittable": len(chosen),
            "right": len(chosen) - len(wrong),
            "share": round((len(chosen) - len(wrong)) / len(chosen), 4),
            "wrong": {name: known_reason(name) or wrong[name] for name in sorted(wrong)},
            "not_splittable": dict(sorted(whys.items())),
            "not_splittable_tests": {
                why: sorted(name for name, text in others.items() if text == why)
                for why in sorted(whys)
            },
        },
    }


def main() -> None:
    """Writes the report to the file given."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    torch.set_num_threads(1)
    counts = report()
    path.write_text(json.dumps(counts, indent=1) + "\n")
    ranks = counts["two_ranks"]
    assert isinstance(ranks, dict)
    print(
        f"{counts['split']} of {counts['strategies']} strategies split something, "
        f"{counts['failures']} fail; on two ranks {ranks['right']} of "
        f"{ranks['splittable']} node tests are right; written to {path}"
    )


if __name__ == "__main__":
    main()
