"""A walk through a model that gives every operator its option on the axis of time.

Operators are met in the model's order. Each takes its inputs as they come, split or whole, and so
decides how its results come to later operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from autopar.errors import RuleError
from autopar.ir import Graph, Operator, Role, Tensor

from .analysis import Analysis, Offer
from .candidates import options_of
from .layout import B, Kind, P, Placement, R, S
from .rules import RULES, Call, rule_of
from .strategies import Option
from .time_options import Coming, affine, factor_of, fits, silent

Split = Mapping[str, Placement]
"""Tensors that hold the batch though no input leads to them, with their split."""


class Conflict(Exception):
    """No option of an operator takes its inputs as they come.

    `whole`: tensors behind it that came whole and might have come split, the nearest first.
    `why`: the reason, where more is known than that.
    """

    def __init__(self, place: int, whole: list[str], why: str = "") -> None:
        self.place = place
        self.whole = whole
        self.why = why


class TimeWalk:
    """The placements on the axis of time, in the model's order.

    `split`: tensors that hold the batch though no input leads to them: constants, results of the
    preamble, rows that are repeated for every sample.
    """

    def __init__(self, analysis: Analysis, dim: int, size: int, split: Split) -> None:
        self.analysis = analysis
        self.dim = dim
        self.size = size
        self.split = split
        self.graph: Graph = analysis.graph
        self.made: dict[str, Placement] = {}  # of results of warm operators
        self.natural: dict[str, Placement] = {}  # of sources that hold the batch
        self.read: dict[str, Placement] = {}  # of sources, as warm operators read them
        self.options: dict[str, Option] = {}
        self.known: dict[object, Option | None] = {}
        self.producers = self.graph.producers()
        self.sampled: set[str] = set()  # made of the samples of the batch
        for name in (
            *self.graph.inputs,
            *(n for n in split if self.graph.tensors[n].role is Role.CONSTANT),
        ):
            if name in split or self._holds_batch(self.graph.tensors[name]):
                self.natural[name] = split.get(name, S(dim))
        self.sampled.update(n for n in self.graph.inputs if n in self.natural)

    def _holds_batch(self, tensor: Tensor) -> bool:
        return len(tensor.shape) > self.dim and tensor.shape[self.dim] == self.size

    def _may_be_split(self, tensor: Tensor) -> bool:
        return (
            len(tensor.shape) > self.dim
            and tensor.shape[self.dim] > 0
            and tensor.shape[self.dim] % self.size == 0
        )

    def run(self) -> None:
        """Give every operator its option, in order; raises `Conflict` at the first without one."""
        for place, operator in enumerate(self.graph.operators):
            if operator.name in self.analysis.cold:
                self._cold(operator)
            elif not self._warm(operator):
                raise Conflict(place, self._whole_behind(operator), self._needs(operator))
            if not self.sampled.isdisjoint(operator.inputs):
                # A single number of all samples (how many there are) holds none of them.
                self.sampled.update(n for n in operator.outputs if self.graph.tensors[n].size > 1)
        for updated in self.graph.updates.values():
            # A running statistic has one new value, not a part of one from each micro-batch.
            if self.made.get(updated, R).kind in (Kind.SPLIT, Kind.PARTIAL):
                raise Conflict(self.producers[updated][0], [])
        self._prove_sum()

    def _prove_sum(self) -> None:
        """Raise `Conflict` if the loss is not the sum of the micro-batches' losses."""
        loss = self.graph.loss
        if loss in self.analysis.gradients and self.made.get(loss, B) != P:
            raise Conflict(self.producers[loss][0], [], ": the loss is made of no samples")

    def _must_be_cut(self, operator: Operator) -> bool:
        """Whether a gradient comes back through an operator on samples, which is not to be computed
        by every micro-batch.
        """
        trained = not self.analysis.gradients.isdisjoint(operator.outputs)
        return trained and not self.sampled.isdisjoint(operator.inputs)

    def placements(self) -> dict[str, Placement]:
        """Return the placement of every tensor, behind `run`."""
        cold = (
            op
            for op in self.graph.operators
            if op.name in self.analysis.cold and op.name in self.options
        )
        cut = {
            name: self.natural[name]
            for op in cold
            for name in (*op.inputs, *op.outputs)
            if name in self.natural
        }
        return {
            name: self.made.get(name, self.read.get(name, cut.get(name, R)))
            for name in self.graph.tensors
        }

    def _cold(self, operator: Operator) -> None:
        """Run a preamble operator for each micro-batch if it maps samples to samples, else once for
        the whole batch.
        """
        wanted = self.split.get(operator.outputs[0])
        self.natural.update(
            (name, self.split[name]) for name in operator.outputs if name in self.split
        )
        # Operators of the preamble need no rule: without one they run once.
        if operator.kind not in RULES or not (
            wanted is not None or any(name in self.natural for name in operator.inputs)
        ):
            return
        key = (
            self.graph.operator_fingerprint(operator),
            tuple(self.natural.get(name) for name in operator.inputs),
            wanted,
        )
        if key not in self.known:
            self.known[key] = self._handed_on(operator, wanted)
        option = self.known[key]
        if option is not None:
            self.options[operator.name] = option
            self.natural.update(
                (n, p)
                for n, p in zip(operator.outputs, option.outputs, strict=True)
                if p.kind is Kind.SPLIT
            )

    def _handed_on(self, operator: Operator, wanted: Placement | None) -> Option | None:
        """The option of a preamble's operator that takes samples as they come and gives samples."""
        names = operator.inputs
        for option in self._all_options(operator):
            agrees = all(
                p == self.natural.get(n, p) for n, p in zip(names, option.inputs, strict=True)
            )
            if (
                agrees
                and all(p.kind is Kind.SPLIT for p in option.outputs)
                and (wanted is None or option.outputs[0] == wanted)
            ):
                return option
        return None

    def _all_options(self, operator: Operator) -> list[Option]:
        """All options without communication that fit the inputs; includes part counts that a search
        leaves out.
        """
        call = Call.of(self.graph, operator)
        try:
            rule = rule_of(call)
        except RuleError:
            return []
        variants: dict[int, tuple[int, ...]] = {}
        for name, dims in zip(operator.inputs, rule.inputs, strict=True):
            come = self.made.get(name, self.natural.get(name, R))
            if (
                come.kind is Kind.SPLIT
                and (carried := factor_of((come.dim, come.parts), dims, rule)) is not None
            ):
                factor, parts = carried
                variants[factor] = (parts,)
        options = silent(call, options_of(call, rule, self.analysis.gradients, variants))
        return [*options, *affine(call)]

    def _warm(self, operator: Operator) -> bool:
        """Give an operator its option; whether there is one."""
        offer = self.analysis.offers[operator.name]
        key = (
            id(offer),
            tuple(map(self._comes, operator.inputs)),
            self.split.get(operator.outputs[0]),
        )
        if key not in self.known:
            self.known[key] = self._option(operator, offer)
        option = self.known[key]
        if option is None:
            return False
        self.options[operator.name] = option
        self.made.update(zip(operator.outputs, option.outputs, strict=True))
        sliced = (
            (n, p)
            for n, p in zip(operator.inputs, option.inputs, strict=True)
            if n not in self.made and p.kind is Kind.SPLIT
        )
        # A source is sliced in one way for all its readers.
        return all(self.read.setdefault(name, placement) == placement for name, placement in sliced)

    def _comes(self, name: str) -> Coming:
        sampled = name in self.sampled
        if name in self.made:
            return Coming(self.made[name], source=False, sampled=sampled)
        if self.graph.tensors[name].role is Role.PARAMETER:
            placement = B if name in self.analysis.gradients else R
            return Coming(placement, source=False, sampled=False)
        return Coming(self.natural.get(name), source=True, sampled=sampled)

    def _option(self, operator: Operator, offer: Offer) -> Option | None:
        """The option that takes the inputs as they come; an input that nothing splits is whole."""
        # Options that the search does without (other parts, dims that it keeps whole) may still be
        # right over time.
        option = self._best(operator, silent(offer.call, offer.options))
        return option or self._best(operator, self._all_options(operator))

    def _best(self, operator: Operator, options: Iterable[Option]) -> Option | None:
        comes = [self._comes(name) for name in operator.inputs]
        asked = self.split.get(operator.outputs[0])
        cut = asked or S(self.dim)
        must = self._must_be_cut(operator)
        best: tuple[tuple[int, int, bool, bool], Option] | None = None
        for option in options:
            if must and all(placement in (R, B) for placement in option.outputs):
                continue
            pairs = list(zip(option.inputs, comes, strict=True))
            if all(fits(wanted, come) for wanted, come in pairs):
                matched = sum(wanted == come.placement for wanted, come in pairs if come.source)
                shares = sum(wanted == P != come.placement for wanted, come in pairs)
                # First as many sources as possible as they are, then the fewest made shares, then
                # the output split where that is asked for and only there, then no factor at all.
                unasked = (option.outputs[0] == cut) != (asked is not None)
                rank = (-matched, shares, unasked, option.factor >= 0)
                if best is None or rank < best[0]:
                    best = rank, option
        return best[1] if best is not None else None

    def _needs(self, operator: Operator) -> str:
        """The first input of an operator that is a share of a sum over the samples, in words."""
        sums = (name for name in operator.inputs if self.made.get(name) == P)
        return "".join(
            f": it needs {name!r}, a sum or mean over all samples, of which a micro-batch has its "
            "share alone"
            for name in itertools.islice(sums, 1)
        )

    def _whole_behind(self, operator: Operator) -> list[str]:
        """Tensors behind an operator's inputs that came whole and have as many rows as the batch,
        the nearest first.
        """
        seen: dict[str, bool] = {}
        # The list grows while it is walked, which gives the nearest first.
        behind = list(operator.inputs)
        for name in behind:
            if name in seen or self.made.get(name, B) not in (B, R):
                continue
            seen[name] = False
            tensor = self.graph.tensors[name]
            if not self._may_be_split(tensor) and name not in self.made:
                continue
            if name in self.made:
                maker = self.graph.operators[self.producers[name][0]]
                behind += maker.inputs
                offered = (
                    self.analysis.offers[maker.name].options if name == maker.outputs[0] else ()
                )
                makes = any(
                    o.outputs[0] == S(self.dim) and all(p.kind is not Kind.SPLIT for p in o.inputs)
                    for o in offered
                )
                seen[name] = makes and self._may_be_split(tensor)
            elif name not in self.natural:
                seen[name] = tensor.role in (Role.CONSTANT, Role.ACTIVATION)
        return [name for name, splits in seen.items() if splits]
