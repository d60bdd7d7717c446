"""Proves an import: outputs, buffers and gradients of the graph equal those of the model.

    |read - written| <= tolerance * largest |written|

for every output and buffer, and for the gradient of every trainable parameter, where gradients of
nothing but rounding are measured by the largest gradient of all (as in `runtime.checking`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from autopar.errors import ModelError
from autopar.ir import Graph
from autopar.model import LoadedModel
from autopar.runtime.checking.differences import Entry, Observation, Report, differences
from autopar.runtime.models.graph_run import OperatorFails

from .first_difference import first_difference, readers
from .sides import Side, Sides
from .trials import NoTrial, Trial, failed, kinds_without, trials_of

TRIES = 4
"""The most trials of a model that are made; each is an export and a pass."""
_REMEDY = (
    "It is not planned, since its program would be wrong in silence: write the operator in another "
    "way, or leave out the proof (proof=False, --no-proof) if the difference is meant"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome, in words; `proved`: whether the two sides were compared, and are equal."""

    proved: bool
    said: str


class ImportDiffers(ModelError):
    """The graph that was read computes something else than the model (exit code 3)."""


def prove_import(model: LoadedModel) -> Proof:
    """Run the imported graph of a model beside the model, at small sizes.

    A difference is an `ImportDiffers`. Where no trial can be made or run, the proof says why.
    """
    try:
        said = _of_file(model) if model.weights is not None else _of_module(model)
    except NoTrial as error:
        return Proof(proved=False, said=f"the import is not proved: {error}")
    return Proof(proved=True, said=f"the import is proved on one device, {said}")


def _of_file(model: LoadedModel) -> str:
    """The proof of an ONNX file, in words."""
    # A torch model is proved where the package onnx is not installed.
    from .onnx_file import onnx_difference, onnx_trial

    trial, said = onnx_trial(model)
    try:
        difference = onnx_difference(trial)
    except OperatorFails as error:
        difference = str(error)
    if difference:
        raise _differs(model, said, difference)
    return said


def _of_module(model: LoadedModel) -> str:
    """The proof of a module: of the trials that run, the first that leaves out no operator."""
    best: tuple[Trial, list[str]] | None = None
    why = ""
    for make in islice(trials_of(model), TRIES):
        trial, reason = _tried(make)
        if trial is None:
            why = why or reason
            continue
        missing = kinds_without(trial, model)
        if best is None or len(missing) < len(best[1]):
            best = trial, missing
        # Larger copies of a type have the same layers.
        if not missing or model.small is not None:
            break
    if best is None:
        raise NoTrial(why)
    trial, missing = best
    left_out = f"; without {', '.join(missing)}, which only larger sizes have" if missing else ""
    return trial.said + left_out


def _tried(make: Callable[[], Trial]) -> tuple[Trial | None, str]:
    """A trial whose sides are equal; None and why where it cannot be made or run."""
    try:
        trial = make()
        _compare(trial)
    except ImportDiffers:
        raise
    except Exception as error:  # the model's own code may raise anything at sizes not its own
        return None, failed(error)
    return trial, ""


def _compare(trial: Trial) -> None:
    """Raise `ImportDiffers` where the two sides of a trial differ."""
    sides = Sides(trial)
    written = sides.written()
    try:
        difference = _difference(sides, written, sides.read())
    except OperatorFails as error:
        difference = str(error)
    if not difference:
        return
    if _difference(sides, sides.written(), written):
        raise NoTrial("its results change from call to call")
    raise _differs(trial.model, trial.said, difference)


def _differs(model: LoadedModel, sizes: str, difference: str) -> ImportDiffers:
    return ImportDiffers(
        f"{model.source.name}: the graph that was read computes something else than the model "
        f"({sizes}): {difference}. {_REMEDY}"
    )


def _difference(sides: Sides, written: Side, read: Side) -> str:
    """The first difference of two sides, in words; "" where they are equal."""
    graph = sides.graph
    for name, gradient in written.gradients.items():
        if (gradient is None) != (read.gradients[name] is None):
            none = "gets a gradient in the model and none in its graph"
            some = "gets a gradient in its graph and none in the model"
            return f"{name!r} {some if gradient is None else none}{readers(graph, name)}"
    report = differences(
        _observed(written),
        _observed(read),
        graph=graph,
        optimizer="none",
        perturbed=lambda: _observed(sides.perturbed()),
    )
    if report.passed:
        return ""
    entry = _first(report, graph)
    what = f"the {entry.what} {entry.tensor!r} differs by {entry.error:.1e} of its largest element"
    return what + first_difference(sides, entry.tensor, of_gradient=entry.what == "gradient")


def _first(report: Report, graph: Graph) -> Entry:
    """The difference to tell: of an output where there is one, else of the gradient made first."""
    wrong = [entry for entry in report.entries if not entry.passed]
    outputs = [entry for entry in wrong if entry.what == "output"]
    read = {name: place for place, op in enumerate(graph.operators) for name in op.inputs}
    return max(outputs or wrong, key=lambda entry: (read.get(entry.tensor, -1), entry.error))


def _observed(side: Side) -> Observation:
    gradients = {name: value for name, value in side.gradients.items() if value is not None}
    return Observation(
        outputs=side.outputs, losses=(), gradients=gradients, smallest={}, largest={}, weights={}
    )
