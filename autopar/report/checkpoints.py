"""The output of `autopar checkpoint show` and `convert`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlanError, UsageError
from autopar.runtime.training.latest import find_checkpoint, latest_in
from autopar.runtime.training.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Entry,
    Manifest,
    checkpoints_in,
    read_manifest,
)
from autopar.units import bytes_text

from .tables import Table


def read_checkpoint(folder: str) -> tuple[Path, Manifest]:
    """The latest checkpoint of a folder, or the folder itself if it is one."""
    path = find_checkpoint(folder)
    if path is None:
        raise PlanError(f"{folder}: holds no checkpoint")
    return path, read_manifest(path)[0]


def checkpoint_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The manifest, without its entries for each tensor and file."""
    told = manifest.model_dump(
        mode="json", by_alias=True, exclude={"tensors", "files", "scalars", "groups"}
    )
    return {
        **told,
        "path": str(path),
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
    }


def checkpoint_parts(path: Path, manifest: Manifest) -> list[str | Table]:
    """The manifest in lines, and its tensors by kind."""
    made = (
        f"step {manifest.step} of {manifest.model}, saved by {manifest.ranks} ranks of autopar "
        f"{manifest.made_by}"
    )
    lines = [
        f"{path}: {made}",
        f"model {manifest.model_fingerprint or 'without a fingerprint: a plain module'}",
        f"plan {manifest.plan_fingerprint}: {manifest.plan}"
        if manifest.plan_fingerprint
        else "plan none",
        f"optimizer {manifest.optimizer or 'none'}, {len(manifest.groups)} groups; "
        f"data position {'saved' if manifest.sampler is not None else 'not saved'}",
        f"{bytes_text(manifest.nbytes)} in {len(manifest.files)} files",
    ]
    return ["\n".join(map(_printable, lines)), _tensors(manifest), _beside(path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of `autopar checkpoint convert`; `kind`: weights, or a checkpoint."""

    source: Path
    path: Path
    kind: str
    tensors: int
    nbytes: int

    @property
    def sentence(self) -> str:
        """The result in words, for the terminal."""
        use = (
            "autopar.resume reads it"
            if self.kind == "checkpoint"
            else "transformers and autopar.parallelize(weights=...) read them"
        )
        return (
            f"{self.source} -> {self.path}: {self.kind} of {self.tensors} tensors, "
            f"{bytes_text(self.nbytes)}; {use}"
        )

    def json(self) -> dict[str, Any]:
        """The result as an object, for programs."""
        return {
            "source": str(self.source),
            "path": str(self.path),
            "kind": self.kind,
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }


def converted(
    folder: str, output: str, *, name: str | None, dtype: str | None, strip: str, add: str
) -> Converted:
    """Write a checkpoint as Hugging Face weights, or such weights as a checkpoint."""
    from autopar.runtime.training.export import export_checkpoint
    from autopar.runtime.training.importing import import_weights

    given = Path(folder)
    if not given.exists():
        raise UsageError(
            f"{folder}: does not exist; give a folder of checkpoints, or safetensors files"
        )
    if given.is_dir() and (
        (given / MANIFEST).is_file() or latest_in(given) is not None or checkpoints_in(given)
    ):
        source = find_checkpoint(given, name)
        assert source is not None
        tensors = len(read_manifest(source)[0].named(MODEL))
        made = export_checkpoint(source, output, dtype=dtype, strip=strip, add=add)
        kind = "weights"
    else:
        if name is not None:
            raise UsageError(f"{folder}: holds no checkpoints, among which --name could tell")
        source = given
        made = import_weights(given, output, dtype=dtype, strip=strip, add=add)
        kind = "checkpoint"
        tensors = len(read_manifest(made)[0].tensors)
    nbytes = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    return Converted(source=source, path=made, kind=kind, tensors=tensors, nbytes=nbytes)


def _printable(line: str) -> str:
    """A line without control characters, which a foreign file may contain."""
    return "".join(character if character.isprintable() else "?" for character in line)


def _tensors(manifest: Manifest) -> Table:
    kinds = (
        ("parameters and buffers", MODEL),
        ("optimizer", OPTIMIZER),
        ("random numbers", "random."),
    )
    rows = []
    for kind, prefix in kinds:
        held = manifest.named(prefix)
        types = ", ".join(
            f"{count} {dtype}"
            for dtype, count in sorted(Counter(entry.dtype for entry in held.values()).items())
        )
        rows.append(
            (kind, str(len(held)), str(sum(map(_elements, held.values()))), types or "none")
        )
    return Table(
        title="Tensors", columns=("of", ">tensors", ">elements", "types"), rows=tuple(rows)
    )


def _elements(entry: Entry) -> int:
    elements = 1
    for size in entry.shape:
        elements *= size
    return elements


def _beside(path: Path) -> str:
    names = checkpoints_in(path.parent)
    newest = latest_in(path.parent)
    return "in the same folder: " + ", ".join(
        f"{name} (latest)" if name == newest else name for name in names
    )
