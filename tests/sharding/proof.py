"""Proves the rule of every aten operator on torch's own samples and on the hand-written ones;
`python -m tests.sharding.proof`.

Every strategy of every sample is executed shard by shard and compared with the whole, values and
gradients.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from autopar.errors import RuleError
from autopar.runtime.proof import Execution, Sample, decisions, sample
from autopar.sharding.layout import format_layout
from autopar.sharding.program import Decision
from autopar.sharding.rules import RULES
from tests.sharding.capture import Captured
from tests.sharding.opinfo import calls_of, operators
from tests.sharding.samples import exists

from . import (
    samples,
    samples_communicating,
    samples_halo,
    samples_of_layers,
    samples_of_moves,
    samples_of_numbers,
)

MESHES = ((2,), (3,), (2, 2))
QUOTAS = {
    "float64, even": 20,
    "float64": 6,
    "float32": 4,
    "integer": 6,
    "bool": 3,
    "complex": 4,
    "empty": 1,
}
"""At most so many of torch's samples of a kind, by what they are made of; "even": every size above
1 divides by 4 or by 6.
"""
BY_HAND = (
    samples,
    samples_of_numbers,
    samples_of_moves,
    samples_of_layers,
    samples_communicating,
    samples_halo,
)
TOLERANCES = {"float32": 1e-4, "complex64": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""How far values may be off, relative or absolute: what rounding leaves where random addends make
up a sum. Others: 1e-9.
"""
LARGEST = 30_000
"""Samples with more elements than this are left out: others show the same."""
_EMPTY = (
    "empty.memory_format empty_like.default empty_permuted.default empty_strided.default "
    "new_empty.default new_empty_strided.default"
)
UNDEFINED = frozenset(f"aten.{name}" for name in _EMPTY.split())
"""Operators whose result has no defined value."""
IN_PLACE = frozenset({"aten.detach_.default"})
"""Operators that a graph holds in another form."""


@dataclass(slots=True, kw_only=True)
class Account:
    """The samples of one kind that were proved: `split` are the strategies that split a factor;
    `refused` the samples for which there is no rule.

    `rule` is the line of its first sample, one of `rules` different ones; `unsplit` counts the
    factors of these lines that could be split but in no sample were, as the sizes did not divide;
    `in_double` the strategies of float32 samples that are off by more than rounding may be, but
    equal to 1e-9 when the same values are given as float64.
    """

    rule: str = ""
    samples: int = 0
    by_hand: int = 0
    strategies: int = 0
    split: int = 0
    rules: int = 0
    unsplit: int = 0
    in_double: int = 0
    refused: int = 0
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class Proof:
    """The results of a kind's samples; `factors`: for each line, those that can be split, and
    whether they were.
    """

    account: Account = field(default_factory=Account)
    factors: dict[str, dict[str, bool]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, case: Sample, meshes: Iterable[tuple[int, ...]]) -> None:
        """Prove a sample on these meshes."""
        try:
            whole = Execution(case)
        except (
            RuntimeError,
            NotImplementedError,
        ) as error:  # torch itself has no such call or no gradient of it
            self.messages.append(f"LEFT OUT {case}: {error}")
            return
        self.account.samples += 1
        try:
            for mesh in meshes:
                for decision in decisions(case, mesh):
                    self._try(whole, decision, mesh)
        except RuleError as error:
            self.account.refused += 1
            self.messages.append(f"REFUSED {case}: {error}")

    def _try(self, whole: Execution, decision: Decision, mesh: tuple[int, ...]) -> None:
        rule = decision.rule
        account = self.account
        assert rule is not None
        account.rule = account.rule or rule.text
        account.strategies += 1
        split = {
            rule.factors[o.factor].name
            for o, n in zip(decision.options, mesh, strict=True)
            if o.factor >= 0 and n > 1
        }
        account.split += bool(split)
        known = self.factors.setdefault(rule.text, {})
        for factor in rule.factors:
            if not factor.whole and factor.size > 1:
                known[factor.name] = known.get(factor.name, False) or factor.name in split
        account.rules = len(self.factors)
        account.unsplit = sum(
            not done for factors in self.factors.values() for done in factors.values()
        )
        try:
            whole.check(decision, mesh)
        except Exception as error:
            if self._holds_in_double(whole.case, decision, mesh):
                account.in_double += 1
                return
            account.failures += 1
            names = " ".join(option.name for option in decision.options)
            layouts = " | ".join(map(format_layout, decision.inputs))
            self.messages.append(
                f"FAILED {whole.case} on {mesh}: {names}, {layouts} ({rule.text}): "
                f"{type(error).__name__}: {error}"
            )

    @staticmethod
    def _holds_in_double(case: Sample, decision: Decision, mesh: tuple[int, ...]) -> bool:
        if case.tolerance != TOLERANCES["float32"]:
            return False
        values = tuple(v.double() if v.dtype == torch.float32 else v for v in case.values)
        tensors = {
            name: replace(t, dtype="float64") if t.dtype == "float32" else t
            for name, t in case.graph.tensors.items()
        }
        double = replace(
            case, values=values, graph=replace(case.graph, tensors=tensors), tolerance=1e-9
        )
        try:
            Execution(double).check(decision, mesh)
        except Exception:  # then the failure in single stands
            return False
        return True


def kinds_to_prove() -> list[str]:
    """Every aten kind with a rule that this torch has and whose result has a value."""
    return sorted(
        kind
        for kind in RULES
        if kind.startswith("aten.") and exists(kind) and kind not in UNDEFINED | IN_PLACE
    )


def _class_of(call: Captured) -> str:
    tensors = call.tensors()
    if any(tensor.numel() == 0 for tensor in tensors):
        return "empty"
    types = {tensor.dtype for tensor in tensors}
    if not tensors or (torch.float64 in types and torch.complex128 not in types):
        even = all(
            size == 1 or size % 4 == 0 or size % 6 == 0
            for tensor in tensors
            for size in tensor.shape
        )
        return "float64, even" if even else "float64"
    if any(dtype.is_complex for dtype in types):
        return "complex"
    if torch.float32 in types:
        return "float32"
    return "bool" if types == {torch.bool} else "integer"


def chosen(
    kinds: Collection[str], quotas: Mapping[str, int], *, seed: int = 0, quick: bool = False
) -> dict[str, list[Sample]]:
    """Torch's samples of each kind: those first in the order of a hash, so that what is chosen does
    not depend on what else there is.
    """
    kept: dict[tuple[str, str], dict[int, Captured]] = {}
    for operator in operators():
        for call in calls_of(operator, kinds, quick=quick):
            group = _class_of(call)
            if sum(map(torch.numel, call.tensors())) > LARGEST or not quotas.get(group):
                continue
            best = kept.setdefault((call.kind, group), {})
            best[zlib.crc32(f"{seed}{call.signature}".encode())] = call
            if len(best) > quotas[group]:
                del best[max(best)]
    results: dict[str, list[Sample]] = {}
    for (kind, _), calls in sorted(kept.items()):
        results.setdefault(kind, []).extend(
            made for _, call in sorted(calls.items()) for made in as_sample(call)
        )
    return results


def as_sample(call: Captured) -> Iterator[Sample]:
    """The call as a sample, if it gives tensors and can be repeated."""
    try:
        made = sample(call.kind, call.signature.partition("(")[2][:-1], **call.arguments)
        yield replace(
            made,
            tolerance=max(
                TOLERANCES.get(tensor.dtype, 1e-9) for tensor in made.graph.tensors.values()
            ),
        )
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return


def by_hand() -> dict[str, list[Sample]]:
    """The hand-written samples by kind."""
    results: dict[str, list[Sample]] = {}
    for family in (family for module in BY_HAND for family in module.FAMILIES.values()):
        for case in family():
            results.setdefault(case.kind, []).append(case)
    return results


def prove_all(
    kinds: Sequence[str], meshes: Sequence[tuple[int, ...]], *, quick: bool = False
) -> dict[str, Proof]:
    """Prove the rules of these kinds on torch's samples and on the hand-written ones, and print a
    table.
    """
    given = chosen(kinds, QUOTAS, quick=quick)
    written = by_hand()
    proofs = {}
    for kind in kinds:
        proof = proofs[kind] = Proof()
        for case in (*written.get(kind, ()), *given.get(kind, ())):
            proof.add(case, meshes)
        proof.account.by_hand = len(written.get(kind, ()))
        print("\n".join([line(kind, proof), *proof.messages[:5]]), flush=True)
    return proofs


def line(kind: str, proof: Proof) -> str:
    """One row of the table."""
    account = proof.account
    return (
        f"{kind:60} {account.samples:5} {account.by_hand:5} {account.strategies:7} "
        f"{account.split:7} {account.rules:4} {account.unsplit:4} "
        f"{account.refused:4} {account.failures:4}"
    )


def document(proofs: Mapping[str, Proof]) -> dict[str, object]:
    """The result as it is written down: nothing in it changes from run to run."""
    rows = {kind: asdict(proof.account) for kind, proof in sorted(proofs.items())}
    totals = {
        name: sum(row[name] for row in rows.values())
        for name in asdict(Account())
        if name != "rule"
    }
    return {
        "torch": torch.__version__.partition("+")[0],
        "meshes": [list(mesh) for mesh in MESHES],
        "totals": {"kinds": len(rows), **totals},
        "not proven": sorted(
            kind for kind in RULES if kind.startswith("aten.") and kind not in proofs
        ),
        "by hand only": [kind for kind, row in rows.items() if row["samples"] == row["by_hand"]],
        "never split": [kind for kind, row in rows.items() if not row["split"]],
        "kinds": rows,
    }


def main() -> int:
    """Prove the chosen kinds (all), print a table, and write it down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["aten.*"], help="patterns of operator kinds")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file")
    parser.add_argument("--quick", action="store_true", help="few of torch's samples, on two ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [
        kind
        for kind in kinds_to_prove()
        if any(fnmatch.fnmatch(kind, pattern) for pattern in given.kinds)
    ]
    proofs = prove_all(kinds, MESHES[:1] if given.quick else MESHES, quick=given.quick)
    text = document(proofs)
    print(json.dumps(text["totals"]))
    if given.output:
        given.output.write_text(json.dumps(text, indent=1) + "\n")
    accounts = [proof.account for proof in proofs.values()]
    return int(
        any(account.failures or account.refused or not account.samples for account in accounts)
    )


if __name__ == "__main__":
    sys.exit(main())
