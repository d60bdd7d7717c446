"""Weights from others: safetensors files of Hugging Face become a checkpoint.

Any plan resumes from it. One tensor is read at a time, and one file is in memory. The checkpoint
has no optimizer and no position in the data.
"""

from __future__ import annotations

import math
from pathlib import Path

import autopar
from autopar.errors import UsageError, unknown
from autopar.ir.dtype import FLOATS
from autopar.runtime.files.weight_files import FileTensor, read_headers

from .durable_files import (
    checksum_of,
    discard,
    dtype_name,
    point_to,
    synchronise,
    torch_dtype,
    write_synchronised,
)
from .export import LIMIT, parts_within, require_prefix
from .manifest import (
    MANIFEST,
    MODEL,
    UNFINISHED,
    Entry,
    Manifest,
    Piece,
    checkpoint_name,
    manifest_text,
)


def import_weights(
    weights: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    strip: str = "",
    add: str = "",
    limit: int = LIMIT,
) -> Path:
    """Make a checkpoint of step 0 from a `.safetensors` file, or a folder of them; its path.

    `folder`: a new folder. `dtype`: the type of floating-point numbers in it (default: that of the
    files); a plan loads tensors of the type in which it stores the parameter. `strip`: a prefix to
    remove from all names; `add`: a prefix to add instead.
    """
    target = Path(folder).absolute()
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(unknown("floating-point type", dtype, FLOATS))
    if target.exists():
        raise UsageError(f"{target}: is there already; name a new folder")
    source = Path(weights)
    tensors = read_headers(source)
    require_prefix(tensors, strip)
    named = {add + name.removeprefix(strip): tensor for name, tensor in tensors.items()}
    name = checkpoint_name(0, [])
    making = target / (UNFINISHED + name)
    making.mkdir(parents=True)
    try:
        model = source.stem if source.is_file() else source.absolute().name
        _write(named, making, model, dtype, limit)
        making.rename(target / name)
        synchronise(target)
        point_to(target, name)
    except BaseException:
        discard(target)
        raise
    return target / name


def _write(
    named: dict[str, FileTensor], making: Path, model: str, dtype: str | None, limit: int
) -> None:
    """Write the tensors' files and the manifest of one rank."""
    from safetensors.torch import save_file

    entries = {}
    files = {}
    # Integers keep their type: they are indices or flags, not weights.
    wanted = {
        name: torch_dtype(dtype) if dtype and tensor.is_float else tensor.dtype
        for name, tensor in named.items()
    }
    sizes = {
        name: math.prod(tensor.shape) * wanted[name].itemsize for name, tensor in named.items()
    }
    for number, names in enumerate(parts_within(sizes, limit)):
        file = f"rank-{number:05d}.safetensors"
        values = {MODEL + name: named[name]().to(wanted[name]) for name in names}
        save_file(values, making / file)
        synchronise(making / file)
        files[file] = (making / file).stat().st_size
        for name in names:
            shape = named[name].shape
            key = MODEL + name
            # Every tensor is a single piece, which ranks of a plan read in part.
            start = (0,) * len(shape)
            crc = checksum_of(values[key])
            piece = Piece(file=file, key=key, offsets=start, shape=shape, crc=crc)
            entries[key] = Entry(shape=shape, dtype=dtype_name(wanted[name]), pieces=(piece,))
    manifest = Manifest(
        made_by=autopar.__version__, step=0, ranks=1, model=model, tensors=entries, files=files
    )
    write_synchronised(making / MANIFEST, manifest_text(manifest))
    synchronise(making)
