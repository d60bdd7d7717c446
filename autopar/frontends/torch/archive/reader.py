"""Reads a `.pt2` file as an `ExportedProgram` without running its code.

Torch gets a rebuilt archive and raw weights.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveWriter

from autopar.errors import AutoparError, ModelError
from autopar.frontends.torch.importer import read_exported
from autopar.model import TorchModel

from .entries import MODEL, Archive, Doubts, Malformed, opened, size_of_file
from .program import Program
from .values import device, tensor_meta

_LOGGERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
"""The number by which an archive names a type."""
_STRIDED = 7
_ALONE = frozenset(
    {
        "aten::_assert_tensor_metadata",
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::sym_constrain_range",
    }
)
"""Operators that check something and give nothing."""
_FILES = frozenset({"filename", "file", "path"})
_FIRST_LINE = 300


def read_archive(path: str, *, trust: bool = False) -> tuple[torch.nn.Module, TorchModel]:
    """The module and the graph of an archive.

    Without `trust`, parts that could run code raise a `ModelError`.
    """
    size = size_of_file(path)
    with _in_words(path), _without_logs() as logged:
        exported = _loaded(path, logged) if trust else _distrusted(path, size, logged)
        return exported.module(), read_exported(exported, module=None, name=Path(path).stem)


def _distrusted(path: str, size: int, logged: _Held) -> torch.export.ExportedProgram:
    doubts = Doubts()
    with opened(path, size, doubts) as archive:
        doubts.raise_any(path)
        return _checked(archive, doubts, path, logged)


@contextmanager
def _in_words(path: str) -> Iterator[None]:
    """Any exception that torch raises on a file, as one sentence."""
    try:
        yield
    except AutoparError:
        raise
    except Malformed as error:
        raise ModelError(f"{path} cannot be read as a torch.export archive: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as a torch.export archive: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_FIRST_LINE]


class _Held(logging.Filter):
    """Suppresses log records and keeps the last error in one of them."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if (
            record.exc_info
            and isinstance(record.exc_info, tuple)
            and record.exc_info[1] is not None
        ):
            self.error = record.exc_info[1]
        return False


@contextmanager
def _without_logs() -> Iterator[_Held]:
    """Hold back the traceback that torch logs before it raises another error.

    The first error is told in our words.
    """
    held = _Held()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(held)
    try:
        yield held
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(held)


def _loaded(source: str | io.BytesIO, logged: _Held) -> torch.export.ExportedProgram:
    try:
        return torch.export.load(source)
    except Exception as error:
        raise (logged.error or error) from None


def _checked(
    archive: Archive, doubts: Doubts, path: str, logged: _Held
) -> torch.export.ExportedProgram:
    """Rebuild the archive without its values, load that, and put the values in."""
    program = archive.json(
        "serialized_exported_program.json" if archive.legacy else f"models/{MODEL}.json"
    )
    rebuilt = Program(doubts=doubts, operator=_objection).rebuilt(program)
    parts = ("state_dict", "constants") if archive.legacy else ("weights", "constants")
    states = [_values(archive, part, doubts) for part in parts]
    doubts.raise_any(path)
    _require_devices(rebuilt)
    exported = _loaded(_emptied(rebuilt, states), logged)
    for own, state in zip((exported.state_dict, exported.constants), states, strict=True):
        own.update(state)
    return exported


def _objection(space: str, name: str, overload: str) -> str:
    """The objection against calling an operator of `torch.ops`.

    It must only make tensors from its arguments.
    """
    packet = getattr(getattr(torch.ops, space, None), name, None)
    operator = getattr(packet, overload or "default", None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or not isinstance(
        operator, torch._ops.OpOverload
    ):
        raise Malformed(
            f"it calls {space}::{name}.{overload}, which is not known here; --rules imports a "
            "module that registers operators"
        )
    schema = operator._schema
    returned = [str(result.type) for result in schema.returns]
    if schema.name in _ALONE:
        return ""
    if not returned or any("Tensor" not in kind for kind in returned):
        return "which does not make tensors alone"
    if _FILES & {argument.name for argument in schema.arguments}:
        return "which reads or writes files"
    return ""


def _require_devices(value: Any) -> None:
    """Refuse tensors on devices that this machine lacks.

    Torch ends the process when it makes them, even without values.
    """
    if torch.cuda.is_available():
        return
    if isinstance(value, Mapping):
        if value.get("type") == "cuda" and "index" in value:
            raise Malformed(
                "its tensors lie on a GPU, and this machine has none; export the model on the CPU"
            )
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        _require_devices(inner)


def _values(archive: Archive, part: str, doubts: Doubts) -> dict[str, torch.Tensor]:
    """The weights or the constants, by their paths."""
    pickled = f"serialized_{part}.pt" if archive.legacy else f"data/{part}/{MODEL}.pt"
    if archive.legacy and pickled not in archive and f"serialized_{part}.json" in archive:
        pickled = f"serialized_{part}.json"
    if archive.legacy or pickled in archive:
        return _unpickled(archive.read(pickled), pickled, doubts)
    config = archive.json(f"data/{part}/{MODEL}_{part}_config.json").get("config")
    if not isinstance(config, dict):
        raise Malformed(f"the list of its {part} is no table")
    flat: dict[str, torch.Tensor] = {}
    values = {}
    check = Program(doubts=doubts, operator=_objection)
    for name, meta in config.items():
        file = meta.get("path_name") if isinstance(meta, dict) else None
        if not isinstance(file, str) or PurePosixPath(file).name != file:
            raise Malformed(f"the file of {name!r} is {file!r}")
        check.path(name)
        if meta.get("use_pickle") is not False or not file.startswith(("weight_", "tensor_")):
            doubts.add(f"the values of {name!r} are pickled")
            continue
        values[name] = _tensor(archive, f"data/{part}/{file}", name, meta, flat)
    return values


def _tensor(
    archive: Archive, entry: str, name: str, meta: Mapping[str, Any], flat: dict[str, torch.Tensor]
) -> torch.Tensor:
    """A view of an entry's bytes.

    An entry without bytes gives a tensor without values, on the meta device.
    """
    described = tensor_meta(meta["tensor_meta"], name)
    dtype = _DTYPES.get(described["dtype"])
    if dtype is None or described["layout"] != _STRIDED:
        raise Malformed(f"{name!r} is of an unknown type or layout")
    sizes, strides = ([value["as_int"] for value in described[key]] for key in ("sizes", "strides"))
    if entry not in flat:
        flat[entry] = _bytes(archive, entry)
    if not archive.size(entry):
        tensor = torch.empty(sizes, dtype=dtype, device="cpu" if 0 in sizes else "meta")
    else:
        tensor = (
            flat[entry]
            .view(dtype)
            .as_strided(sizes, strides, described["storage_offset"]["as_int"])
        )
    wanted = device(described["device"])
    if wanted["type"] == "cuda":
        _require_devices([wanted])
        tensor = tensor.to(torch.device(wanted["type"], wanted["index"] or 0))
    if meta.get("is_param") is True:
        return torch.nn.Parameter(tensor, requires_grad=described["requires_grad"])
    return tensor


def _bytes(archive: Archive, entry: str) -> torch.Tensor:
    """The bytes of an entry, read once into the memory that they stay in."""
    buffer = torch.empty(archive.size(entry), dtype=torch.uint8)
    with archive.open(entry) as stream:
        view: memoryview = buffer.numpy().data
        while len(view):
            count = stream.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise Malformed(f"{entry} ends early")
            view = view[count:]
        if stream.read(1):
            raise Malformed(f"{entry} is longer than it says")
    return buffer


def _unpickled(data: bytes, entry: str, doubts: Doubts) -> dict[str, torch.Tensor]:
    """Read the tensors that an older torch pickled.

    The reader makes nothing but tensors and plain containers.
    """
    if not data:
        return {}
    with opened(io.BytesIO(data), len(data), doubts):
        pass
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:
        doubts.add(f"{entry!r} pickles more than tensors")
        return {}
    if not isinstance(state, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        doubts.add(f"{entry!r} holds more than tensors")
        return {}
    check = Program(doubts=doubts, operator=_objection)
    return {check.path(name): value for name, value in state.items()}


def _emptied(program: Mapping[str, Any], states: list[dict[str, torch.Tensor]]) -> io.BytesIO:
    """An archive of the program in which every tensor is a number on the meta device."""
    buffer = io.BytesIO()
    with PT2ArchiveWriter(buffer) as writer:
        writer.write_string(f"models/{MODEL}.json", json.dumps(program))
        writer.write_bytes(f"data/sample_inputs/{MODEL}.pt", b"")
        for part, prefix, state in zip(
            ("weights", "constants"), ("weight_", "tensor_"), states, strict=True
        ):
            config = {}
            for index, (name, value) in enumerate(state.items()):
                is_parameter = isinstance(value, torch.nn.Parameter)
                config[name] = {
                    "path_name": f"{prefix}{index}",
                    "is_param": is_parameter,
                    "use_pickle": False,
                    "tensor_meta": _NUMBER,
                }
                writer.write_bytes(f"data/{part}/{prefix}{index}", b"")
            writer.write_string(
                f"data/{part}/{MODEL}_{part}_config.json", json.dumps({"config": config})
            )
    buffer.seek(0)
    return buffer


_NUMBER = {
    "dtype": 7,
    "sizes": [],
    "requires_grad": False,
    "device": {"type": "meta", "index": None},
    "strides": [],
    "storage_offset": {"as_int": 0},
    "layout": _STRIDED,
}
