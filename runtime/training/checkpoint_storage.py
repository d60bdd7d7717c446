"""Storage for `torch.distributed.checkpoint`: safetensors files and one JSON manifest.

DCP's planners decide which rank writes and reads each piece. DCP's own file format pickles its
index and everything that is no tensor, and reading a pickle executes a stranger's code. So this
format has neither.

A save is made in a folder of another name: all files are written and synchronised, then the
manifest. Then the folder gets its name, and `latest` its content, each by a synchronised rename.
Whenever a process is killed, `latest` names a whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autopar.errors import PlanError

from .durable_files import (
    checksum_of,
    dtype_name,
    point_to,
    prune,
    sweep,
    synchronise,
    torch_dtype,
    write_synchronised,
)
from .latest import step_folders
from .manifest import (
    MANIFEST,
    PLAN,
    UNFINISHED,
    Entry,
    Manifest,
    Piece,
    checkpoint_name,
    checkpoints_in,
    digest,
    manifest_text,
    others,
)

Facts = Any
"""A rank's data for the manifest, sent to rank 0."""


class SafeWriter(StorageWriter):
    """Writes one checkpoint.

    facts: this rank's data for the manifest. describe: makes a manifest without tensors from all
    ranks' facts, on rank 0. own: the names of the training's checkpoints in this folder, to which
    this one is added.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        describe: Callable[[list[Facts]], Manifest],
        *,
        plan: str | None,
        keep: int | None,
        own: set[str],
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.describe = describe
        self.plan = plan
        self.keep = keep
        self.own = own
        self.name = ""
        self._made: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: writing begins when all ranks have a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Send this rank's facts along."""
        return dataclasses.replace(plan, storage_data=self.facts)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on rank 0, and tell each rank its file."""
        self.manifest = self.describe([plan.storage_data for plan in plans])
        self.folder.mkdir(parents=True, exist_ok=True)
        # Only rank 0 removes remains, and only now, when no other save is under way.
        sweep(self.folder)
        self.name = checkpoint_name(self.manifest.step, step_folders(self.folder))
        self._made = self.folder / (UNFINISHED + self.name)
        self._made.mkdir()
        return [
            dataclasses.replace(plan, storage_data=(self.name, f"rank-{rank:05d}.safetensors"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces into its file, if it has any."""
        from safetensors.torch import save_file

        self.name, file = plan.storage_data
        path = self.folder / (UNFINISHED + self.name) / file
        values = {}
        results = []
        for item in plan.items:
            value = planner.resolve_data(item)
            assert isinstance(value, Tensor)
            # On the host first: files are written from there, and the sum is of the bytes in the
            # file.
            held = value.detach().cpu().contiguous()
            key = _key(item.index)
            # A view of a part would drag the whole of its memory along.
            values[key] = held if held.untyped_storage().nbytes() == held.nbytes else held.clone()
            piece = Piece(
                file=file,
                key=key,
                offsets=tuple(item.index.offset or ()),
                shape=tuple(held.shape),
                crc=checksum_of(held),
            )
            results.append(
                WriteResult(index=item.index, size_in_bytes=held.nbytes, storage_data=piece)
            )
        if values:
            save_file(values, path)
            synchronise(path)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe the whole, on rank 0, and give it its name."""
        unfinished = self.folder / (UNFINISHED + self.name)
        entries = {name: _entry(tensor) for name, tensor in metadata.state_dict_metadata.items()}
        pieces: dict[str, list[Piece]] = {name: [] for name in entries}
        for result in itertools.chain.from_iterable(results):
            pieces[result.index.fqn].append(result.storage_data)
        files = sorted({piece.file for piece in itertools.chain.from_iterable(pieces.values())})
        lost = [file for file in files if not (unfinished / file).is_file()]
        if lost:
            raise PlanError(
                f"{lost[0]} does not reach rank 0:"
                f" {self.folder} must be the same folder on all machines"
            )
        tensors = {
            name: entry.model_copy(update={"pieces": tuple(pieces[name])})
            for name, entry in entries.items()
        }
        sizes = {file: (unfinished / file).stat().st_size for file in files}
        # The manifest is written last: a folder without one is no checkpoint.
        self.own.intersection_update(checkpoints_in(self.folder))
        self.own.add(self.name)
        manifest = self.manifest.model_copy(
            update={"tensors": tensors, "files": sizes, "beside": tuple(sorted(self.own))}
        )
        if self.plan is not None:
            write_synchronised(unfinished / PLAN, self.plan)
            manifest = manifest.model_copy(update={"plan_digest": digest(self.plan)})
        write_synchronised(unfinished / MANIFEST, manifest_text(manifest))
        synchronise(unfinished)
        # The order matters: the name comes when the contents are on the disk, `latest` after it.
        unfinished.rename(self.folder / self.name)
        synchronise(self.folder)
        point_to(self.folder, self.name)
        if self.keep is not None:
            prune(self.folder, self.keep, self.own)

    def abandon(self) -> None:
        """Remove the files of a failed save, on rank 0."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP is given the writer itself."""
        return False


class SafeReader(StorageReader):
    """Reads the pieces of a checkpoint that this rank needs.

    Call `require_whole` first: it checks all sums.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata for DCP."""
        tensors: dict[str, Any] = {
            name: _described(entry) for name, entry in self.manifest.tensors.items()
        }
        held = {
            MetadataIndex(name, torch.Size(piece.offsets)): piece
            for name, entry in self.manifest.tensors.items()
            for piece in entry.pieces
        }
        return Metadata(state_dict_metadata=tensors, storage_data=held)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note where the pieces are."""
        self.pieces: Mapping[MetadataIndex, Piece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested items from the pieces, file by file."""

        def place(item: ReadItem) -> tuple[str, str]:
            """The file of an item's piece, and the piece in it."""
            piece = self.pieces[item.storage_index]
            return piece.file, piece.key

        # One piece is in memory at a time: items of the same piece follow one another.
        last: tuple[Piece, Tensor] | None = None
        for item in sorted(plan.items, key=place):
            piece = self.pieces[item.storage_index]
            if last is None or last[0] != piece:
                last = piece, self.read(piece)
            part = last[1]
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            for dim, (start, length) in enumerate(ranges):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def require_whole(self, rank: int = 0, ranks: int = 1) -> None:
        """Refuse damaged pieces before any of them is used; several ranks share the work."""
        # By file, so that neighbouring pieces are read by the same rank.
        pieces = sorted(self.pieces_of_all(), key=lambda piece: (piece.file, piece.key))
        for piece in pieces[len(pieces) * rank // ranks : len(pieces) * (rank + 1) // ranks]:
            if checksum_of(self.read(piece)) != piece.crc:
                raise self._damaged(f"{piece.key} of {piece.file} is not what was saved")

    def pieces_of_all(self) -> list[Piece]:
        """The pieces of all tensors."""
        return [piece for entry in self.manifest.tensors.values() for piece in entry.pieces]

    def read(self, piece: Piece) -> Tensor:
        """A piece, of the shape in which it was saved."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path / piece.file, framework="pt") as file:
                value: Tensor = file.get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise self._damaged(f"{piece.file}: {error}") from error
        # A file of another checkpoint under this name has its own shapes.
        if tuple(value.shape) != piece.shape:
            raise self._damaged(f"{piece.key} of {piece.file} is not what was saved")
        return value

    def _damaged(self, what: str) -> PlanError:
        """The error of a damaged checkpoint, with another one to resume from."""
        return PlanError(f"the checkpoint {self.path} is damaged: {what}{others(self.path)}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP is given the reader itself."""
        return False


def _key(index: MetadataIndex) -> str:
    """The name of a piece in its file."""
    offsets = index.offset or ()
    return f"{index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else index.fqn


def _entry(tensor: Any) -> Entry:
    """A tensor of DCP's metadata as the manifest has it, without pieces."""
    assert isinstance(tensor, TensorStorageMetadata)
    return Entry(shape=tuple(tensor.size), dtype=dtype_name(tensor.properties.dtype))


def _described(entry: Entry) -> TensorStorageMetadata:
    """A tensor of the manifest as DCP's metadata has it."""
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.shape))
        for piece in entry.pieces
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=chunks,
    )
