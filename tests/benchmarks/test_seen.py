"""Constants that were read off what is scored: each is named, and nothing else claims a fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.validating.groups import collective_groups
from benchmarks.validating.rows import COLUMNS, GRID, Table, checked
from benchmarks.validating.seen import READ, UNFITTED, Read, seen_by, without
from benchmarks.validating.steps import machines_of, predict
from benchmarks.validating.training import training_groups

ROOT = Path(__file__).resolve().parents[2]
SCORED = {
    "Dazz993/Mist": "mist_",
    "eth-easl/sailor": "sailor",
    "MooreThreads/SimuMax": "simumax_b200",
    "awslabs/awsome-distributed-training": "collectives, p4de",
    "VIA-Research/vTrain": "vtrain_single",
    "2311.05610": "alephalpha",
    "2104.04473": "sc21_t",
    "pytorch/torchtitan": "torchtitan",
    "mosaicml/llm-foundry": "mpt",
    "bigscience-workshop/bigscience": "bloom",
    "foundation-model-stack/fms-fsdp": "fms",
    "PKU-DAIR/Hetu-Galvatron": "collectives, A100 node (Galvatron)",
}
"""Sources of rows that are scored, with the beginning of the names of their groups."""
MACHINES_OF_THEIR_OWN = {
    # Profiles of V100, whose runs by Mist are not among the rows.
    "costmodel/presets/p3.16xlarge.json": "Dazz993/Mist",
    # The same figures as those of the A100 with 80 GB, which `READ` names.
    "costmodel/presets/dgx-a100.json": "Dazz993/Mist",
    "costmodel/presets/p4d.json": "Dazz993/Mist",
    # Collectives of the nodes whose runs are scored, in the kernels of `READ`'s presets.
    "costmodel/presets/links/pcie-l4.json": "Dazz993/Mist",
    "costmodel/presets/links/pcie-a10g.json": "Dazz993/Mist",
}
"""Files whose figures come from such a source and stand for a machine named elsewhere, or none."""


def figures(value: Any) -> Iterator[dict[str, Any]]:
    """Every figure of a file that states its source."""
    if isinstance(value, dict):
        if "source" in value:
            yield value
        for part in value.values():
            yield from figures(part)
    elif isinstance(value, list):
        for part in value:
            yield from figures(part)


def fitted(path: Path) -> Iterator[str]:
    """The sources of a file's figures that were fitted or measured."""
    for figure in figures(json.loads(path.read_text(encoding="utf-8"))):
        source = str(figure["source"])
        told = (figure.get("kind"), source.partition(":")[0].partition(",")[0])
        if not {"fitted", "measured"}.isdisjoint(told):
            yield source


PRESETS = sorted((ROOT / "costmodel" / "presets").rglob("*.json"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_fitted_figure_from_a_scored_source_is_named(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    for source in fitted(path):
        for word, group in SCORED.items():
            if word not in source or MACHINES_OF_THEIR_OWN.get(place) == word:
                continue
            named = [read for read in READ if read.place == place and read.words in source]
            assert any(name.startswith(group) for read in named for name in read.groups), (
                f"{place}: {source} is scored as {group}, which `READ` does not say"
            )


KERNELS = sorted((ROOT / "costmodel" / "device" / "data").glob("*.json"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_from_a_scored_source_are_those_of_a_named_preset(path: Path) -> None:
    """Kernels that were read off the machines of scored runs: every preset with them is named."""
    fits = json.loads(path.read_text(encoding="utf-8"))["fits"].values()
    words = {word for word in SCORED for fit in fits if word in fit["source"]}
    named = {read.place for read in READ} | {*MACHINES_OF_THEIR_OWN}
    for preset in PRESETS if words else ():
        kernels = json.loads(preset.read_text(encoding="utf-8")).get("device", {}).get("kernels")
        name = kernels.get("name") if isinstance(kernels, dict) else kernels
        assert name != path.stem or str(preset.relative_to(ROOT)) in named, (preset, words)


CLAIM = re.compile(r"fitted to|runs come to|profiled layers|in these very rows", re.IGNORECASE)
OF_KERNELS = (
    "calibration/collective_curves.py",
    "calibration/device_kernels.py",
    "device/grouped_products.py",
    "device/measured_kernels.py",
    "cluster/residual.py",
)
"""Modules whose fits are to kernels (`benchmarks/fit_*.py`) or to a user's measurements."""


@pytest.mark.parametrize("folder", ["costmodel", "benchmarks/validating"])
def test_every_module_that_says_so_is_named(folder: str) -> None:
    """A comment that owns up to a fit is in a file that `READ` names."""
    places = {read.place for read in READ} | {"benchmarks/validating/seen.py"}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = " ".join(path.read_text(encoding="utf-8").replace("#", "").split())
        if CLAIM.search(text) and not str(path).endswith((*OF_KERNELS, "held_out.py")):
            assert str(path.relative_to(ROOT)) in places, path


@pytest.mark.parametrize("read", READ, ids=lambda read: f"{read.what} of {read.groups[0]}")
def test_what_is_named_is_there(read: Read) -> None:
    text = (ROOT / read.place).read_text(encoding="utf-8")
    assert read.words in " ".join(text.replace("#", "").split())
    assert read.apart or read.reason


def test_groups_say_what_they_have_seen() -> None:
    assert [read.what for read in seen_by("bloom")] == ["network"]
    assert seen_by("bloom without its network") == seen_by("sc21_t1") == ()
    assert without("bloom") == "bloom without its network" and without("torchtitan") == ""


def test_a_group_is_scored_without_what_it_has_seen() -> None:
    """On the network as it is stated instead of as it was fitted, steps are shorter."""
    sizes = {
        "group": "bloom",
        "framework": "Megatron-DeepSpeed (BLOOM)",
        "network": "4x100Gb OPA/node",
        "model": "GPT",
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "gpus": 16,
        "seq_len": 128,
        "tp": 1,
        "pp": 1,
        "dp": 16,
        "micro_batch": 1,
        "global_batch": 16,
        "step_time_s": 1.0,
    }
    row = dict.fromkeys(sorted(COLUMNS["steps"]), "") | dict(GRID)
    row |= {name: str(value) for name, value in sizes.items()}
    run = checked(row, Path("invented.csv"), 0)
    seen, apart = training_groups([(row, run)], predict)
    assert [seen.name, apart.name] == ["bloom", "bloom without its network"]
    assert (seen.samples[0].predicted or 0) > (apart.samples[0].predicted or 0)
    assert machines_of({**row, UNFITTED: "network"}).levels[-1].bandwidth == 12.5e9


def test_collectives_are_scored_without_the_link_that_saw_them() -> None:
    row = {
        "collective": "all_reduce",
        "machine": "AWS p4de.24xlarge (8x A100-80 + 4x100Gb EFA)",
        "gpus": "16",
        "nodes": "2",
        "size_bytes": "67108864",
        "busbw_GBps": "40",
        "algbw_GBps": "",
        "time_us": "",
        "notes": "",
        "tool": "nccl-tests",
    }
    table = Table(kind="collectives", name="c", path=Path("c.csv"), rows=(row,))
    groups = {group.name: group for group in collective_groups([table])}
    apart = groups["collectives, p4de, 2 nodes without its link"].samples[0]
    assert apart.predicted != groups["collectives, p4de, 2 nodes"].samples[0].predicted
