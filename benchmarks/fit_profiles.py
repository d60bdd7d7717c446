"""Fits devices without a table of kernels to operators profiled inside GPT layers.

They are written like other devices.

    python benchmarks/fit_profiles.py --data DIR [--out costmodel/device/data]

The products are large, so a constant that they do not determine stays near that of a related device
(`Profiled.like`). That device's attention kernels serve, too, marked as assumed. The A100 is a
check: its constants were fitted to other rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from fit_devices import OUT, plain

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.measured_kernels import (
    Fitted,
    Generation,
    Kernels,
    dumped,
    kernels_of,
)
from autopar.costmodel.device.products import ProductForm, Speed
from autopar.errors import AutoparError
from benchmarks.kernels.fits import (
    as_planned,
    bare,
    crossed,
    fit_products,
    judged,
    log_error,
    priced_products,
)
from benchmarks.kernels.profiles import products, streams
from benchmarks.kernels.rows import Rows

SOURCE = "Dazz993/Mist@d69e530a, operators profiled in GPT layers on {gpu}"
DTYPE = "float16"
PRIOR = 0.3
"""Strength of the prior near the related device's constants.

Residuals that a whole range of a constant counts as.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A device of the rows.

    Processors, peak FLOP/s of 16-bit floats and B/s of memory are its data sheet's. `like` names a
    measured device.
    """

    gpu: str
    units: int
    peak: float
    memory: float
    like: str


DEVICES: Mapping[str, Profiled] = {
    "v100_sxm2": Profiled(
        gpu="V100-SXM2-32GB", units=80, peak=125e12, memory=900e9, like="a100_sxm"
    ),
    "l4": Profiled(gpu="L4-24GB", units=58, peak=121e12, memory=300e9, like="l40s"),
    "a10g": Profiled(gpu="A10G-24GB", units=80, peak=70e12, memory=600e9, like="a100_sxm"),
}
CHECK = Profiled(gpu="A100-SXM4-40GB", units=108, peak=312e12, memory=1555e9, like="a100_sxm")


def start_of(form: ProductForm) -> dict[str, float]:
    """The constants of a form by name.

    Profiled products ran for long, so its burst is the sustained clock.
    """
    scalars = {
        name: value for name, value in asdict(form).items() if isinstance(value, float | int)
    }
    return {**scalars, **asdict(form.sustained)}


def fitted_products(rows: Rows, speed: Speed, like: ProductForm) -> ProductForm:
    """The form of the rows at one clock.

    Profiled layers ran one operator behind the other, as in training.
    """
    form = fit_products(rows, speed, starts=(start_of(like),), prior=PRIOR)
    return replace(form, sustained=form.burst, libraries={})


def streaming(rows: Rows, memory: float) -> tuple[float, Fitted]:
    """The fraction of the memory's rate that streaming operators reach, and its errors."""
    moved = rows.numbers("bytes")

    def fraction(some: Rows) -> float:
        return float(np.median(some.numbers("bytes") / some.seconds / memory))

    def left(folded: Rows) -> np.ndarray:
        own = folded.part(folded.held)
        return -log_error(
            own.numbers("bytes") / (memory * fraction(folded.part(~folded.held))), own
        )

    reached = fraction(rows.part(~rows.held))
    held = rows.part(rows.held)
    return reached, judged(moved[rows.held] / (memory * reached), held, "", crossed(rows, left))


def borrowed(
    like: str,
) -> tuple[dict[str, AttentionForm], dict[str, Generation], dict[str, Fitted]]:
    """The attention of a related device, which nothing here was fitted to."""
    kernels = kernels_of(like)
    said = f"assumed: no fused attention was measured here; as on {like}, in fractions of the peak"
    generations = {name: replace(entry, source=said) for name, entry in kernels.generations.items()}
    attention = {entry.kernel: kernels.attention[entry.kernel] for entry in generations.values()}
    return (
        attention,
        generations,
        {f"attention {name}": Fitted(kind="assumed", source=said) for name in attention},
    )


def fitted(folder: Path, name: str, device: Profiled) -> Kernels:
    """The kernels of a device."""
    rows = products(folder, device.gpu)
    source = SOURCE.format(gpu=device.gpu)
    speed = Speed(
        flops=device.peak, memory=device.memory, reference=device.memory, units=device.units
    )
    fit = partial(fitted_products, speed=speed, like=kernels_of(device.like).products["bfloat16"])
    priced = partial(priced_products, speed=speed)
    form = fit(rows)

    def left(folded: Rows) -> np.ndarray:
        own = folded.part(folded.held)
        return -log_error(as_planned(fit(folded), own, speed), own)

    attention, generations, fits = borrowed(device.like)
    fits[f"products {DTYPE}"] = judged(
        priced(form, rows.part(rows.held)), rows.part(rows.held), source, crossed(rows, left)
    )
    reached, fits["elementwise"] = streaming(streams(folder, device.gpu), device.memory)
    fits["elementwise"] = replace(
        fits["elementwise"], source=f"{source}: {reached:.3f} of the memory's rate"
    )
    for what in (f"products {DTYPE}", "elementwise"):
        print(f"{name}: {what}: {told(fits[what])}; {fits[what].source}", file=sys.stderr)
    return Kernels(
        name=name,
        units=device.units,
        memory=device.memory,
        peak={DTYPE: device.peak},
        products={DTYPE: form},
        attention=attention,
        generations=generations,
        fits=fits,
    )


def told(fit: Fitted) -> str:
    """The errors of a fit, in words."""
    low, high = np.exp((fit.low, fit.high))
    return (
        f"{fit.rows} rows, {fit.held} held back: median {fit.median:.1%}, 90 % within "
        f"{fit.p90:.1%}; interval {low:.2f} to {high:.2f}"
    )


def check(folder: Path) -> str:
    """The errors of the A100's constants, fitted to other rows, on these rows."""
    rows = products(folder, CHECK.gpu)
    speed = Speed(flops=CHECK.peak, memory=CHECK.memory, reference=CHECK.memory, units=CHECK.units)
    predicted = priced_products(
        bare(kernels_of(CHECK.like).products["bfloat16"]), rows, speed, known=False
    )
    left = Residual.of(-log_error(predicted, rows))
    reached, fit = streaming(streams(folder, CHECK.gpu), CHECK.memory)
    low, middle, high = np.exp((left.low, left.middle, left.high))
    return (
        f"check on {CHECK.gpu} with the constants of {CHECK.like}: {left.rows} products take "
        f"{middle:.2f} of the price (nine in ten "
        f"{low:.2f} to {high:.2f}); streams reach {reached:.3f} of the memory's rate, {told(fit)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="a folder with mist_ops.csv.gz"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where the files go")
    given = parser.parse_args(arguments)
    try:
        print(check(given.data), file=sys.stderr)
        for name, device in DEVICES.items():
            text = json.dumps(
                plain({"version": 1, **dumped(fitted(given.data, name, device))}), indent=1
            )
            (given.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    except AutoparError as error:
        print(f"fit_profiles: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
