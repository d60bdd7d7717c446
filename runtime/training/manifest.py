"""The manifest of a checkpoint, which is read without pickle or torch.

It is one JSON file beside safetensors files of pieces. It begins with the digest of its rest, and
has those of all other files: of the plan as a whole, of tensors piece by piece.

  FOLDER/latest                          the last whole checkpoint: its name, its manifest's digest
  FOLDER/training.lock                   the process that saves into this folder
  FOLDER/step-00000200/checkpoint.json   this module's `Manifest`
  FOLDER/step-00000200/plan.json         the plan that ran, if one did
  FOLDER/step-00000200/rank-00000.safetensors
  FOLDER/.saving-step-00000300/          a save under way, or the rest of one that was killed
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import PlanError
from autopar.file_limits import PLAN_BYTES
from autopar.reading import read_text

SCHEMA = "autopar-checkpoint"
MANIFEST = "checkpoint.json"
PLAN = "plan.json"
UNFINISHED = ".saving-"
MODEL = "model."
OPTIMIZER = "optimizer."
RANDOM = "random."
COMPRESSION = "compression."
"""Prefixes of the names of tensors, by their owner."""
_DIGEST = '{"digest":"'
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


class _Part(BaseModel):
    """A part of the manifest: it has the named fields alone, and none of them changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _own_file(name: str) -> str:
    """Refuse a path that leaves the checkpoint's folder."""
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no file of a rank")
    return name


Sizes = tuple[Annotated[int, Field(ge=0)], ...]
FileName = Annotated[str, AfterValidator(_own_file)]


class Piece(_Part):
    """A piece of a tensor: its offsets in the whole, and the file's entry that holds it.

    crc: the CRC-32 of its bytes.
    """

    file: FileName
    key: str
    offsets: Sizes
    shape: Sizes
    crc: int


class Entry(_Part):
    """A tensor of the checkpoint, whole, and its pieces."""

    shape: Sizes
    dtype: str
    pieces: tuple[Piece, ...] = ()


class Scalar(_Part):
    """A number of an optimizer's state.

    dtype: of the tensor that has it, else "int", "float", "bool" or "none".
    """

    dtype: str
    value: float | int | bool | None


class Group(_Part):
    """A group of an optimizer's parameters, by their names in the model."""

    names: tuple[str, ...]
    options: dict[str, Any]


class Manifest(_Part):
    """The contents of a checkpoint but for the numbers of its tensors.

    beside: names of the checkpoints of the same training in its folder, itself among them.
    """

    schema_: Literal["autopar-checkpoint"] = Field(default="autopar-checkpoint", alias="schema")
    version: Literal[1] = 1
    made_by: str
    step: int = Field(ge=0)
    ranks: int = Field(ge=1)
    model: str
    model_fingerprint: str | None = None
    plan_fingerprint: str | None = None
    plan: str = ""
    plan_digest: str | None = None
    optimizer: str | None = None
    groups: tuple[Group, ...] = ()
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Entry]
    files: dict[FileName, int]
    beside: tuple[str, ...] = ()
    sampler: dict[str, Any] | None = None
    extra: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of all files of tensors."""
        return sum(self.files.values())

    def named(self, prefix: str) -> dict[str, Entry]:
        """The tensors with this prefix, under names without it."""
        return {
            name.removeprefix(prefix): entry
            for name, entry in self.tensors.items()
            if name.startswith(prefix)
        }


def digest(text: str) -> str:
    """The digest under which a text is saved."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def manifest_text(manifest: Manifest) -> str:
    """The text of a manifest's file, which begins with the digest of its rest."""
    rest = manifest.model_dump_json(by_alias=True).removeprefix("{")
    return f'{_DIGEST}{digest(rest)}",{rest}'


def told_digest(text: str) -> str | None:
    """The digest with which a manifest's text begins; None if it is of a version without."""
    if not text.startswith(_DIGEST):
        return None
    return text.removeprefix(_DIGEST).partition('",')[0]


def _without_digest(path: Path, text: str) -> str:
    """The manifest in a file's text, whose digest, if it has one, is right."""
    if not text.startswith(_DIGEST):
        return text  # of a version without digests
    _, _, rest = text.removeprefix(_DIGEST).partition('",')
    if told_digest(text) != digest(rest):
        raise PlanError(
            f"the checkpoint {path} is damaged: {MANIFEST} is not what was saved{others(path)}"
        )
    return "{" + rest


def checkpoint_name(step: int, taken: list[str]) -> str:
    """A name for a checkpoint of a step that no other of the same step has.

    >>> checkpoint_name(7, ["step-00000007", "step-00000007.1"])
    'step-00000007.2'
    """
    first = f"step-{step:08d}"
    names = (first, *(f"{first}.{number}" for number in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)


def checkpoints_in(folder: Path) -> list[str]:
    """The names of the whole checkpoints in the order in which they were saved."""
    # A training that was set back saves smaller steps later: the time says the order, not the name.
    saved = [
        ((path.stat().st_mtime_ns, path.parent.name))
        for path in folder.glob(f"*/{MANIFEST}")
        if NAME.fullmatch(path.parent.name)
    ]
    return [name for _, name in sorted(saved)]


def read_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint, and its text.

    A checkpoint with missing or truncated files is refused.
    """
    try:
        text = _without_digest(path, part_text(path / MANIFEST))
        data = json.loads(text)
        # Checked before pydantic does, which would list every missing field of some other JSON
        # file.
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise PlanError(f"{path / MANIFEST}: no checkpoint: it holds no 'schema': '{SCHEMA}'")
        if data.get("version") != 1:
            raise PlanError(
                f"{path / MANIFEST}: version {data.get('version')!r} of a checkpoint;"
                " this autopar reads version 1"
            )
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        # One problem in the message: a damaged file has hundreds.
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(
            f"{path / MANIFEST}: no valid checkpoint: {where}: {first['msg']}"
        ) from error
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path / MANIFEST}: cannot be read: {error}") from error
    _require_files(path, manifest)
    _require_pieces(path, manifest)
    _require_plan(path, manifest)
    return manifest, text


def part_text(path: Path) -> str:
    """The text of a file of a checkpoint."""
    return read_text(path, PLAN_BYTES, what="part of a checkpoint", error=PlanError)


def _require_files(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose files are not all there, or not of their sizes."""
    for file, size in manifest.files.items():
        held = (path / file).stat().st_size if (path / file).is_file() else None
        if held != size:
            problem = "is missing" if held is None else f"has {held} bytes instead of {size}"
            raise PlanError(f"the checkpoint {path} is damaged: {file} {problem}{others(path)}")


def _require_plan(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose plan is not the one that was saved."""
    if manifest.plan_digest is None:
        return
    try:
        held = digest(part_text(path / PLAN))
    except PlanError:
        held = ""
    if held != manifest.plan_digest:
        raise PlanError(
            f"the checkpoint {path} is damaged: {PLAN} is not what was saved{others(path)}"
        )


def _require_pieces(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint with a tensor whose pieces are not all of it."""
    for name, entry in manifest.tensors.items():
        elements = math.prod(entry.shape)
        held = sum(math.prod(piece.shape) for piece in entry.pieces)
        # An element has a byte at least: a larger tensor would only fill the reader's memory.
        if held != elements or elements > manifest.nbytes:
            raise PlanError(
                f"the checkpoint {path} is damaged:"
                f" the pieces of {name!r} do not make it up{others(path)}"
            )


def others(path: Path) -> str:
    """Other checkpoints to resume from, in words."""
    names = [name for name in checkpoints_in(path.parent) if name != path.name]
    return f"; name={names[-1]!r} is the one before" if names else ""
