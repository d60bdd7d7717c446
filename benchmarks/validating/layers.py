"""Published and predicted times of one transformer layer.

The addition of a fourth layer to a step's passes.
"""

from __future__ import annotations

import re
from collections import Counter

from autopar.errors import UsageError

from .prepared import MANY
from .rows import COLUMNS, GRID, Row, Table, checked
from .scores import Group, Sample
from .steps import predict
from .training import Predict, priced, work

SHAPE = re.compile(
    r"h(?P<hidden>\d+) a(?P<heads>\d+) s(?P<seq_len>\d+), micro-batch (?P<micro_batch>\d+), "
    r"TP(?P<tp>\d+)"
)
COLUMN = {"": "combined_ms", " forward": "forward_ms", " backward": "backward_ms"}


def layer_groups(table: Table, predicted: Predict = predict) -> list[Group]:
    """The forward and backward pass of every row, together and each by itself."""
    samples: dict[str, list[Sample]] = {part: [] for part in COLUMN}
    left_out: Counter[str] = Counter()
    for number, row in enumerate(table.rows):
        measured = {
            part: milliseconds(row, column, table, number) for part, column in COLUMN.items()
        }
        sample = further_layer(row, table, number, predicted)
        if isinstance(sample, str):
            left_out[sample] += 1
            continue
        forward, backward, flops = sample
        for part, seconds in zip(COLUMN, (forward + backward, forward, backward), strict=True):
            label = f"{row['setting']}, {row['what']}"
            whole = flops if part == "" else None  # the null model's count is of both passes
            samples[part].append(
                Sample(label=label, measured=measured[part], predicted=seconds, work=whole)
            )
    return [
        Group(name=table.name + part, samples=tuple(sample), left_out=dict(left_out))
        for part, sample in samples.items()
    ]


def further_layer(
    row: Row, table: Table, number: int, predicted: Predict
) -> tuple[float, float, float] | str:
    """Seconds forward and backward and the work of a further layer, or why there are none."""
    step = step_row(row)
    if step is None:
        return "its shape is not given"
    models = []
    for layers in ("3", "4"):
        model = {**step, "layers": layers}
        run = checked(model, table.path, number)
        prices = priced(model, run, predicted)
        if isinstance(prices, str):
            return prices
        shape, price = prices
        flops = work(run, shape)
        assert flops is not None
        models.append((price.forward[0], price.backward[0], flops))
    one, two = models
    return two[0] - one[0], two[1] - one[1], (two[2] - one[2]) / MANY


def milliseconds(row: Row, column: str, table: Table, number: int) -> float | None:
    """Seconds of a cell in milliseconds."""
    try:
        return float(row[column]) * 1e-3 if row[column] else None
    except ValueError as error:
        raise UsageError(
            f"{table.path.name}, row {number + 1}, column {column}: {row[column]!r} is no number"
        ) from error


def step_row(row: Row) -> Row | None:
    """A measured layer as a training step of several micro-batches.

    The framework is Megatron-LM of 2022, whose layers were measured.
    """
    match = SHAPE.search(row["what"])
    if match is None:
        return None
    setting = row["setting"]
    recompute = next((word for word in ("full", "selective") if word in setting), "none")
    own = {
        "id": setting,
        "group": "layer",
        "framework": "Megatron-LM 2022",
        "gpu": row["gpu"],
        "layers": "3",
        "recompute": recompute,
        "seq_parallel": "1" if "sequence" in setting else "0",
        "gpus": match["tp"],
        "pp": "1",
        "dp": "1",
        "global_batch": str(MANY * int(match["micro_batch"])),
        "step_time_s": "1",
    }
    return {**dict.fromkeys(sorted(COLUMNS["steps"]), ""), **GRID, **match.groupdict(), **own}
