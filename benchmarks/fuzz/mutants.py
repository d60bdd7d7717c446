"""Mutants of files: changed bytes anywhere, and changed values in JSON, TOML, protobuf and zip."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from google.protobuf.message import Message

WORDS = (
    "",
    "x",
    "\x1b[2J",
    "\x1b]0;t\x07",
    "\u202eabc",
    "</script>",
    "../../../etc/passwd",
    "/etc/passwd",
    "\ud800",
    "a\nb",
    "{{7*7}}",
    "%s%n",
    "S0",
    "P",
    "R",
    "R R R",
    "nan",
    "x" * 5000,
    "../x.bin",
    "float32",
    "__import__('os').system('true')",
    "\x00",
    "١٢٣",
    "1e999",
    "0x10",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
    10**30,
    0.0,
    -0.0,
    0.5,
    1e300,
    -1e300,
    1e-300,
)
OTHERS = (None, True, False, [], {}, [[]], {"": {}}, [None] * 50)
DEEP = 20_000


def mutant(name: str, data: bytes, chance: random.Random) -> bytes:
    """A file with one to a few changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = _changed(name, data, chance)
    return data


def _changed(name: str, data: bytes, chance: random.Random) -> bytes:
    structured = chance.random() < 0.75
    if structured and name.endswith(".json"):
        return _json(data, chance)
    if structured and name.endswith((".toml", ".sh")):
        return _lines(data, chance)
    if structured and name.endswith(".onnx"):
        return _proto(data, chance)
    if structured and name.endswith(".pt2"):
        return _zip(data, chance)
    if structured and name.endswith(".safetensors") and len(data) > 8:
        return _safetensors(data, chance)
    return _bytes(data, chance)


def _bytes(data: bytes, chance: random.Random) -> bytes:
    """Bits flipped, bytes cut out, doubled, put in or cut off."""
    if not data:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
    at = chance.randrange(len(data))
    length = chance.choice((1, 1, 2, 4, 8, 64))
    match chance.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[: at + length] + data[at:]
        case 3:
            return data[:at] + struct.pack("<q", int(chance.choice(NUMBERS[:14]))) + data[at + 8 :]
        case 4:
            return (
                data[:at]
                + chance.choice(WORDS).encode("utf-8", "surrogatepass")
                + data[at + length :]
            )
        case _:
            return data[:at]


def value(chance: random.Random) -> Any:
    """Something that nobody expects."""
    kind: Any = chance.choice((WORDS, NUMBERS, OTHERS))
    return chance.choice(kind)


def places(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in nested values."""
    if path:
        yield path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(held, dict):
        items = held.items()
    elif isinstance(held, list):
        items = enumerate(held)
    for key, inner in items:
        yield from places(inner, (*path, key))


def _json(data: bytes, chance: random.Random) -> bytes:
    try:
        held = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, chance)
    if chance.random() < 0.01:
        return b'{"a":' * DEEP + b"1" + b"}" * DEEP
    held = changed_values(held, chance)
    try:
        return json.dumps(held, allow_nan=True).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def changed_values(held: Any, chance: random.Random) -> Any:
    """Nested values with one replaced, removed, renamed or repeated.

    Each depth is equally likely.
    """
    values = list(places(held))
    if not values:
        return value(chance)
    depth = chance.randint(1, max(map(len, values)))
    *path, key = chance.choice([p for p in values if len(p) == depth] or values)
    inside = held
    for part in path:
        inside = inside[part]
    match chance.randrange(7):
        case 0 | 1:
            inside[key] = value(chance)
        case 5 | 6:  # values of the right kind are read further
            inside[key] = _alike(inside[key], held, chance)
        case 2:
            del inside[key]
        case 3 if isinstance(inside, dict):
            inside[chance.choice(WORDS)] = inside.pop(key)
        case _ if isinstance(inside, list):
            inside.extend([inside[key]] * chance.choice((1, 3, 100)))
        case _:
            inside[key] = [inside[key]]
    return held


def _alike(given: Any, held: Any, chance: random.Random) -> Any:
    """Another value of the same kind: from the same file, or a neighbouring number."""
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        return chance.choice((given + 1, given - 1, given * 2, given // 2, -given, 2**31, 0))
    if isinstance(given, float):
        return chance.choice((given * 1e9, given / 1e9, -given, 0.0, 1e308, 5e-324))
    others = [value for path in places(held) if type(value := _at(held, path)) is type(given)]
    return chance.choice(others) if others else given


def _at(held: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        held = held[part]
    return held


def _lines(data: bytes, chance: random.Random) -> bytes:
    """Lines of `key = value` or `--option value` with another value, twice, or gone."""
    lines = data.decode("utf-8", "replace").splitlines()
    if not lines:
        return _bytes(data, chance)
    at = chance.randrange(len(lines))
    head, separator, _ = lines[at].partition(" = " if " = " in lines[at] else " ")
    match chance.randrange(4):
        case 0 | 1:
            given = value(chance)
            lines[at] = f"{head}{separator}{json.dumps(given) if separator == ' = ' else given}"
        case 2:
            lines.insert(at, lines[at])
        case _:
            del lines[at]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _proto(data: bytes, chance: random.Random) -> bytes:
    """A field of a message somewhere in a model set to something else."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return _bytes(data, chance)
    messages = list(_messages(model, 0))
    message = chance.choice(messages)
    field = chance.choice(list(message.DESCRIPTOR.fields))
    try:
        _set(message, field, chance)
        return model.SerializeToString()
    except Exception:
        return _bytes(data, chance)


def _messages(message: Message, depth: int) -> Iterator[Message]:
    yield message
    for field, held in message.ListFields():
        if field.message_type is not None and depth < 8:
            repeated = not isinstance(held, Message)
            for inner in held if repeated else (held,):
                if isinstance(inner, Message):
                    yield from _messages(inner, depth + 1)


def _set(message: Message, field: Any, chance: random.Random) -> None:
    held = getattr(message, field.name)
    many = hasattr(held, "append") or hasattr(held, "add")
    if many and len(held) and chance.random() < 0.5:
        at = chance.randrange(len(held))
        if chance.random() < 0.5:
            del held[at]
        elif field.message_type is not None:
            held.add().CopyFrom(held[at])
        else:
            held.append(held[at])
        return
    given = _scalar(field, chance)
    if field.message_type is not None:
        if many:
            held.add()
        else:
            message.ClearField(field.name)
    elif many:
        held.append(given)
    else:
        setattr(message, field.name, given)


def _scalar(field: Any, chance: random.Random) -> Any:
    kinds = type(field)
    if field.cpp_type == kinds.CPPTYPE_STRING:
        word = chance.choice(WORDS).encode("utf-8", "surrogatepass")
        return word if field.type == kinds.TYPE_BYTES else word.decode("utf-8", "replace")
    if field.cpp_type in (kinds.CPPTYPE_FLOAT, kinds.CPPTYPE_DOUBLE):
        return float(chance.choice((*NUMBERS, float("nan"), float("inf"))))
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return chance.randrange(0, 25)
    top = 2**31 - 1 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 2**63 - 1
    return max(-top, min(top, int(chance.choice(NUMBERS))))


def _zip(data: bytes, chance: random.Random) -> bytes:
    """An archive with one of its files changed, renamed, gone or doubled."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:
        return _bytes(data, chance)
    if not files:
        return _bytes(data, chance)
    texts = [i for i, (name, _) in enumerate(files) if name.endswith(".json")] or [0]
    at = chance.choice(texts) if chance.random() < 0.8 else chance.randrange(len(files))
    name, held = files[at]
    match chance.randrange(8):
        case 0:
            del files[at]
        case 1:
            files[at] = (
                chance.choice(("../../x", "/tmp/x", "m/models/model.json", name + "x")),
                held,
            )
        case _:
            files[at] = (
                name,
                _json(held, chance) if name.endswith(".json") else _bytes(held, chance),
            )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, held in files:
            archive.writestr(name or "x", held)
    return out.getvalue()


def _safetensors(data: bytes, chance: random.Random) -> bytes:
    """The header of a file of tensors changed, its length right or wrong."""
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    rest = data[8 + length :]
    changed = _json(header, chance) if chance.random() < 0.8 else header
    if chance.random() < 0.8:
        size = len(changed)
    else:
        size = int(chance.choice((0, 1, 2**20, 2**40, 2**63 - 1)))
    return struct.pack("<Q", size) + changed + rest
