"""The speed of a plan in the words of training logs, and the cost of a run of many tokens."""

from __future__ import annotations

from typing import Any

from autopar.analysis.program.throughput import Budget, Cost, Throughput, cost_of, throughput_of
from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.units import amount_text, count_text, rate_text, seconds_text

DAY = 86400.0
DEFINITION = (
    "FLOPs are the model's: 2 for each multiply-add of its products and of attention, half of it "
    "behind a causal mask, forward and backward, nothing that is recomputed"
)
"""The definition of the FLOPs in TFLOP/s and MFU (`autopar.sharding.model_flops`)."""


def batch_line(plan: Plan) -> str:
    """A line with samples and tokens of a step."""
    speed = throughput_of(plan)
    of = f" sequence{_s(speed.samples)} of {speed.sequence:,} tokens" if speed.sequence else ""
    total = f", {speed.tokens:,} tokens a step" if speed.tokens > speed.sequence else ""
    name, spec = next(iter(plan.model.inputs.items()))
    more = f" and {len(plan.model.inputs) - 1} more" if len(plan.model.inputs) > 1 else ""
    return f"batch {speed.samples}{of}{total} ({name} {' x '.join(map(str, spec.shape))}{more})"


def warning_lines(plan: Plan) -> list[str]:
    """A line about a batch that is smaller than the devices."""
    samples = throughput_of(plan).samples
    devices = plan.devices + plan.unused
    if not plan.model.inputs or samples >= devices:
        return []
    return [
        f"warning: the global batch of {samples} is smaller than the {devices} devices, which have "
        "to share its samples: --batch gives a larger one"
    ]


def speed_text(speed: Throughput, unit: str) -> str:
    """Samples or tokens a second and device, FLOP/s and MFU; `unit`: the word for a device."""
    if speed.tokens:
        said = f"{amount_text(speed.tokens_per_second / speed.devices)} tokens/s/{unit}"
    else:
        said = f"{amount_text(speed.samples_per_second / speed.devices)} samples/s/{unit}"
    if speed.flops:
        said += f", {rate_text(speed.flops_per_device, f'FLOP/s/{unit}')}"
    if speed.mfu is not None:
        said += f", MFU {share_text(speed.mfu)}"
    return said


def share_text(share: float) -> str:
    """A share in percent.

    >>> share_text(0.4171), share_text(0.00042)
    ('41.7%', '0.042%')
    """
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.2g}%"


def speed_lines(plan: Plan, cluster: Cluster | None, budget: Budget | None = None) -> list[str]:
    """A line with the speed, and one with the cost of the run that is asked about."""
    if not plan.predicted.step:
        return []
    speed = throughput_of(plan, cluster)
    counted = " (FLOPs of the model, nothing recomputed)" if speed.flops else ""
    lines = [f"speed {speed_text(speed, unit_of(cluster))}{counted}"]
    if budget is not None and (budget.tokens or budget.price):
        lines.append(_cost_text(cost_of(speed, budget), speed, budget, unit_of(cluster)))
    return lines


def unit_of(cluster: Cluster | None) -> str:
    """The word for a device."""
    return "device" if cluster is not None and cluster.backend == "gloo" else "GPU"


def _cost_text(cost: Cost, speed: Throughput, budget: Budget, unit: str) -> str:
    paid = ""
    if cost.money is not None:
        paid = f": {amount_text(cost.money)} at {budget.price:g} a {unit} and hour"
    if budget.tokens is None:
        return f"cost of a step {cost.device_hours:.3g} {unit} hours{paid}"
    long = f"{amount_text(cost.seconds / DAY)} days"
    if cost.seconds < DAY:
        long = seconds_text(cost.seconds)
    devices = f"{speed.devices:,} {unit}{_s(speed.devices)}"
    return (
        f"run {count_text(budget.tokens)} tokens take {amount_text(cost.steps)} steps, {long}, "
        f"{amount_text(cost.device_hours)} {unit} hours on {devices}{paid}"
    )


def speed_json(plan: Plan, cluster: Cluster | None, budget: Budget | None = None) -> dict[str, Any]:
    """Speed and cost as plain values: of a second and device, FLOP/s, hours."""
    speed = throughput_of(plan, cluster)
    said: dict[str, Any] = {
        "samples_per_step": speed.samples,
        "tokens_per_step": speed.tokens or None,
        "samples_per_second": speed.samples_per_second,
        "tokens_per_second": speed.tokens_per_second or None,
        "tokens_per_second_per_device": speed.tokens_per_second / speed.devices or None,
        "model_flops": plan.model.flops,
        "flops_per_second_per_device": speed.flops_per_device or None,
        "mfu": speed.mfu,
        "flops_definition": DEFINITION,
    }
    if budget is not None and (budget.tokens or budget.price):
        cost = cost_of(speed, budget)
        said["run"] = {
            "tokens": budget.tokens,
            "price": budget.price,
            "steps": cost.steps,
            "seconds": cost.seconds,
            "device_hours": cost.device_hours,
            "money": cost.money,
        }
    return said


def _s(count: int) -> str:
    return "s" if count != 1 else ""
