"""Differences of a run from the reference, within tolerances.

Elements that rounding noise makes incomparable are left out. Where a run is outside its tolerance,
the reference may be made again with its weights off by a rounding (`nudged`):

    tolerance = max(tolerance, min(SPREAD * |perturbed - reference|, WIDEST * tolerance))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir import Graph
from autopar.ir.recipes import BITS, recipe_in
from autopar.sharding.matrices import MUON, hidden_matrices
from autopar.sharding.rules import without_parameters

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
"""Largest error, as a fraction of the largest magnitude in the tensor."""

NOISE = 64
"""Rounding noise of a gradient in units of the machine precision, as a fraction of the largest
magnitude.
"""

SPREAD = 4.0
"""How many times what one rounding of the weights changes is still no difference."""

WIDEST = 30.0
"""No model is so sensitive that errors of more tolerances than this are taken for rounding."""

LEARNING_RATES: Mapping[str, float] = {"adamw": 1e-3, "muon": 1e-3, "sgd": 1e-2}
MOMENTUM = 0.9
"""The momentum of SGD in a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Results of a run, whole and on the CPU: gradients of the first step, weights after the last.

    `smallest`, `largest`: the least and the greatest magnitude of each element of each gradient in
    any step.
    """

    outputs: Mapping[str, Tensor]
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    smallest: Mapping[str, Tensor]
    largest: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        """Let gradients be dense, as those of some look-ups in the original are not."""
        dense = {n: g.to_dense() if g.is_sparse else g for n, g in self.gradients.items()}
        object.__setattr__(self, "gradients", dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One comparison.

    `error`, `tolerance`: as fractions of the largest magnitude. `excluded`: uncounted elements.
    """

    what: str
    tensor: str
    error: float
    tolerance: float
    elements: int
    excluded: int = 0

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance (a NaN is not)."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every comparison of a check."""

    entries: tuple[Entry, ...]

    @property
    def passed(self) -> bool:
        """Whether all comparisons are within their tolerances."""
        return all(entry.passed for entry in self.entries)

    @property
    def worst(self) -> Entry | None:
        """The comparison with the largest error in units of its tolerance."""
        return max(
            self.entries,
            key=lambda e: e.error / e.tolerance if e.error == e.error else float("inf"),
            default=None,
        )

    @property
    def excluded(self) -> int:
        """Elements of weights that were left out because their gradient is rounding noise."""
        return sum(entry.excluded for entry in self.entries)

    def __str__(self) -> str:
        counts = Counter(entry.what for entry in self.entries)
        verdict = "equal to" if self.passed else "DIFFERS from"
        text = ", ".join(f"{n} {_plural(what, n)}" for what, n in counts.items())
        worst = self.worst
        where = ""
        if worst:
            where = (
                f"; worst error {worst.error:.2e} "
                f"({worst.what} {worst.tensor}, tolerance {worst.tolerance:.0e})"
            )
        noise = ""
        if self.excluded:
            noise = (
                f"; {self.excluded} weight elements left out (their gradients are rounding noise)"
            )
        return f"{verdict} one device: {text}{where}{noise}"


def _plural(what: str, count: int) -> str:
    if count == 1:
        return what
    return f"{what}es" if what.endswith("s") else f"{what}s"


def nudged(value: Tensor) -> Tensor:
    """A copy of a value whose floats are one rounding larger or smaller, at random."""
    up = torch.randint(2, value.shape, generator=torch.Generator().manual_seed(0))
    eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0
    return value + value * (eps * (2 * up - 1)).to(value)


def differences(
    reference: Observation,
    observed: Observation,
    *,
    graph: Graph | None = None,
    optimizer: str = "adamw",
    perturbed: Callable[[], Observation] | None = None,
) -> Report:
    """Compare a run with the reference; gradients and weights on one side only are infinite errors.

    The tolerance is that of the tensor's dtype, or of the coarsest float dtype in the `graph`
    behind a parameter. `perturbed`: the reference of weights that are `nudged`.
    """
    report = _compared(reference, observed, graph, optimizer)
    if report.passed or perturbed is None:
        return report
    entries = _compared(reference, perturbed(), graph, optimizer).entries
    errors = {(entry.what, entry.tensor): entry.error for entry in entries}

    def widened(entry: Entry) -> Entry:
        moved = SPREAD * errors.get((entry.what, entry.tensor), 0.0)
        wider = max(entry.tolerance, min(moved, WIDEST * entry.tolerance))
        return replace(entry, tolerance=wider)

    return Report(entries=tuple(map(widened, report.entries)))


def _compared(
    reference: Observation, observed: Observation, graph: Graph | None, optimizer: str
) -> Report:
    dtypes = _dtypes(graph) if graph else {v.dtype for v in reference.gradients.values()}
    coarsest = max(
        (d for d in dtypes if d in TOLERANCES), key=lambda d: TOLERANCES[d], default=torch.float64
    )
    recipe = recipe_in(graph) if graph is not None else None
    floor = TOLERANCES[coarsest]
    if recipe is not None and coarsest is not torch.float64:
        # Noise of wider types lets some operands round to a neighbour. In float64 it hardly does.
        coarsest = torch.bfloat16
        floor = TOLERANCES[coarsest] * 8 / BITS[recipe.values]
    precision = torch.finfo(coarsest).eps
    entries = [
        _entry("output", name, (value, observed.outputs.get(name)), floor)
        for name, value in reference.outputs.items()
    ]
    for number, (ours, theirs) in enumerate(zip(observed.losses, reference.losses, strict=True)):
        error = abs(ours - theirs) / (abs(theirs) or 1.0)
        entries.append(
            Entry(
                what="loss", tensor=f"step {number + 1}", error=error, tolerance=floor, elements=1
            )
        )
    matrices = hidden_matrices(graph) if graph and optimizer == MUON else frozenset()
    # Noise is measured by the largest gradient of all: gradients that are zero but for rounding,
    # such as those of biases of keys, have no scale of their own.
    scale = max((_largest(g) for g in reference.gradients.values()), default=0.0)
    for name in sorted({*reference.gradients, *observed.gradients}):
        gradient = reference.gradients.get(name)
        noise = NOISE * precision * scale
        entries.append(
            _entry(
                "gradient", name, (gradient, observed.gradients.get(name)), floor, absolute=noise
            )
        )
    for name, weight in reference.weights.items():
        keep = None
        if name not in matrices:
            keep = _comparable(name, reference, observed, scale, optimizer, precision)
        pair = (weight, observed.weights.get(name))
        slack = 0.0
        if optimizer == "sgd":
            slack = _carried(len(reference.losses)) * NOISE * precision * scale
        if matrices and precision > torch.finfo(torch.float64).eps:
            slack = _rounded(weight, len(reference.losses), whole=name in matrices)
        entries.append(_entry("weight", name, pair, floor, absolute=slack, keep=keep))
    return Report(entries=tuple(entries))


def _dtypes(graph: Graph) -> set[torch.dtype]:
    """Dtypes of the results of operators that depend on a parameter."""
    free = {op.name for op in without_parameters(graph)}
    names = {name for op in graph.operators if op.name not in free for name in op.outputs}
    return {getattr(torch, graph.tensors[name].dtype) for name in names}


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    if value.is_complex() or value.dtype == torch.bool:
        return float(value.abs().max())
    # A copy of absolute values would take as much memory as a large gradient.
    low, high = value.aminmax()
    return float(torch.maximum(-low, high))


def _entry(
    what: str,
    name: str,
    pair: tuple[Tensor | None, Tensor | None],
    floor: float,
    *,
    absolute: float = 0.0,
    keep: Tensor | None = None,
) -> Entry:
    """Largest difference over largest magnitude, with `absolute` allowed on top.

    `pair`: of the reference and as observed. `keep`: the elements that count.
    """
    reference, observed = pair
    given = reference if reference is not None else observed
    assert given is not None
    # Integers and booleans must be equal.
    tolerance = max(TOLERANCES[given.dtype], floor) if given.dtype in TOLERANCES else 1e-300
    if reference is None or observed is None or reference.shape != observed.shape:
        return Entry(
            what=what, tensor=name, error=float("inf"), tolerance=tolerance, elements=given.numel()
        )
    if keep is None and torch.equal(reference, observed):
        return Entry(what=what, tensor=name, error=0.0, tolerance=tolerance, elements=given.numel())
    # In wide types, so that the comparison adds no rounding of its own.
    wide = torch.float64 if reference.is_floating_point() else torch.int64
    reference = reference.to(wide)
    observed = observed.to(wide)
    # Masks hold infinities: equal ones are no difference.
    difference = torch.where(
        reference == observed, torch.zeros((), dtype=wide), (reference - observed).abs()
    )
    finite = reference[torch.isfinite(reference)] if reference.is_floating_point() else reference
    size = _largest(finite) + absolute / tolerance
    if keep is not None:
        difference = difference[keep]
    largest = float(difference.max()) if difference.numel() else 0.0
    # Beside a tensor of zeros every difference is infinitely large.
    error = 0.0 if largest == 0 else float("inf")
    if size:
        error = largest / size
    excluded = reference.numel() - difference.numel()
    return Entry(
        what=what,
        tensor=name,
        error=error,
        tolerance=tolerance,
        elements=reference.numel(),
        excluded=excluded,
    )


def _carried(steps: int) -> float:
    """How far SGD moves a weight in these steps for each unit of a gradient that stays the same.

    A weight that starts as zero and whose gradient is zero but for rounding is nothing else.
    """
    velocity = 0.0
    moved = 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + 1.0
        moved += LEARNING_RATES["sgd"] * velocity
    return moved


def _rounded(weight: Tensor, steps: int, *, whole: bool) -> float:
    """How far rounding alone may move an element of a weight under Muon.

    The update of a `whole` matrix is computed in bfloat16, from a gradient with noise of its own,
    which may round to a neighbour. From the second step on other gradients differ as well. Noise of
    float64 practically never rounds otherwise.
    """
    step = LEARNING_RATES[MUON]
    if whole:
        rows, columns = weight.shape[-2:]
        step *= max(1.0, rows / columns) ** 0.5
    return float(steps * step * TOLERANCES[torch.bfloat16])


def _comparable(
    name: str,
    reference: Observation,
    observed: Observation,
    scale: float,
    optimizer: str,
    precision: float,
) -> Tensor | None:
    """Elements of a weight that a check can hold to the tolerance.

    AdamW divides a gradient by its own magnitude: noise of size n moves an element by about rate *
    n / |gradient|. Elements for which that exceeds the tolerance are excluded. An exactly zero
    gradient moves nothing and is included.

    The noise of a gradient is at least that of its largest element, and what the first step shows:
    sums whose terms cancel have more. Gradients are held to a tolerance of their own, so that a
    wrong one is no noise.
    """
    seen = name in reference.smallest and name in observed.smallest
    if optimizer not in ("adamw", MUON) or not seen:
        return None
    smallest = reference.smallest[name]
    weight = reference.weights[name]
    precision = max(precision, torch.finfo(smallest.dtype).eps)
    largest = _largest(reference.gradients[name])
    zero = (reference.largest[name] == 0) & (observed.largest[name] == 0)
    if largest <= NOISE * precision * scale:
        return zero
    allowed = max(TOLERANCES[d] for d in TOLERANCES if torch.finfo(d).eps <= precision) * max(
        _largest(weight), 1e-30
    )
    noise = max(NOISE * precision * largest, _apart(name, reference, observed))
    threshold = LEARNING_RATES[optimizer] * noise / allowed
    return zero | (smallest >= threshold)


def _apart(name: str, reference: Observation, observed: Observation) -> float:
    """The largest difference of a gradient in the first step, which no weight has changed yet."""
    other = observed.gradients.get(name)
    if other is None or other.shape != reference.gradients[name].shape:
        return 0.0
    return _largest(reference.gradients[name] - other)
