"""What `autopar checkpoint show` prints: of which model, plan and step a checkpoint is, and how large; no tensor is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.runtime.training.manifest import MODEL, OPTIMIZER, Entry, Manifest, checkpoints_in, find_checkpoint, latest_in, read_manifest

from .tables import Table
from .units import bytes_text


def read_checkpoint(folder: str) -> tuple[Path, Manifest]:
    """The latest checkpoint of a folder, or the one that the folder is."""
    path = find_checkpoint(folder)
    if path is None:
        names = checkpoints_in(Path(folder))
        raise PlanError(
            f"{folder}: holds no checkpoint" + (f" that is whole and the latest; others are {', '.join(names)}" if names else "")
        )
    return path, read_manifest(path)[0]


def checkpoint_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The manifest, without what is said of each tensor and file."""
    told = manifest.model_dump(mode="json", by_alias=True, exclude={"tensors", "files", "scalars", "groups"})
    return {**told, "path": str(path), "tensors": len(manifest.tensors), "files": len(manifest.files), "bytes": manifest.nbytes}


def checkpoint_parts(path: Path, manifest: Manifest) -> list[str | Table]:
    """The same in lines, and its tensors by kind."""
    made = f"step {manifest.step} of {manifest.model}, saved by {manifest.ranks} ranks of autopar {manifest.made_by}"
    lines = [
        f"{path}: {made}",
        f"model {manifest.model_fingerprint or 'without a fingerprint: a plain module'}",
        f"plan {manifest.plan_fingerprint}: {manifest.plan}" if manifest.plan_fingerprint else "plan none",
        f"optimizer {manifest.optimizer or 'none'}, {len(manifest.groups)} groups; "
        f"data position {'saved' if manifest.sampler is not None else 'not saved'}",
        f"{bytes_text(manifest.nbytes)} in {len(manifest.files)} files",
    ]
    return ["\n".join(map(_printable, lines)), _tensors(manifest), _beside(path)]


def _printable(line: str) -> str:
    """What a stranger's file says of itself moves no cursor."""
    return "".join(character if character.isprintable() else "?" for character in line)


def _tensors(manifest: Manifest) -> Table:
    kinds = (("parameters and buffers", MODEL), ("optimizer", OPTIMIZER), ("random numbers", "random."))
    rows = []
    for kind, prefix in kinds:
        held = manifest.named(prefix)
        types = ", ".join(f"{count} {dtype}" for dtype, count in sorted(Counter(entry.dtype for entry in held.values()).items()))
        rows.append((kind, str(len(held)), str(sum(map(_elements, held.values()))), types or "none"))
    return Table(title="Tensors", columns=("of", ">tensors", ">elements", "types"), rows=tuple(rows))


def _elements(entry: Entry) -> int:
    found = 1
    for size in entry.shape:
        found *= size
    return found


def _beside(path: Path) -> str:
    names = checkpoints_in(path.parent)
    newest = latest_in(path.parent)
    return "in the same folder: " + ", ".join(f"{name} (latest)" if name == newest else name for name in names)
