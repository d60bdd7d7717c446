"""The wire format of protocol buffers: numbers, texts, and messages within messages.

A message is a row of fields, each a tag (number << 3 | type) and a value. Types: 0 a varint, 1
eight bytes, 2 a length and so many bytes, 5 four bytes. A varint has seven bits a byte, the lowest
first, and the top bit set if more follow; a negative number is its complement in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.errors import PlanError

VARINT = 0
EIGHT = 1
BYTES = 2
FOUR = 5
_WIDTHS = {EIGHT: 8, FOUR: 4}
# Ten groups of seven bits hold 64 bits.
_LONGEST = 10
Field = tuple[int, int | bytes]
"""A field's number and its value."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next field begins."""
    value = 0
    for place in range(_LONGEST):
        if at + place >= len(data):
            raise PlanError("a strategy checkpoint ends in the middle of a number")
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & (2**64 - 1), at + place + 1
    raise PlanError("a strategy checkpoint holds a number of more than ten bytes")


def fields_of(data: bytes) -> Iterator[Field]:
    """The fields of a message, in their order."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number = tag >> 3
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in _WIDTHS:
            length = _WIDTHS[kind]
        else:
            raise PlanError(f"a strategy checkpoint holds a field of the unknown type {kind}")
        if length > len(data) - at:
            raise PlanError("a strategy checkpoint ends in the middle of a field")
        yield number, data[at : at + length]
        at += length


def message(field: Field) -> bytes:
    """The bytes of a field that is a message or a text."""
    number, value = field
    if not isinstance(value, bytes):
        raise PlanError(
            f"a strategy checkpoint has a number in field {number}, where a message belongs"
        )
    return value


def numbers(data: bytes, number: int = 1) -> tuple[int, ...]:
    """The numbers of a repeated field, one by one or packed, as signed ones."""
    out: list[int] = []
    for field, value in fields_of(data):
        if field != number:
            continue
        if isinstance(value, int):
            out.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            out.append(_signed(one))
    return tuple(out)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def text(data: bytes) -> str:
    """A text; one that is no UTF-8 is refused."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError("a strategy checkpoint holds a name that is no text") from error


def varint(value: int) -> bytes:
    """The bytes of a number.

    >>> varint(300), len(varint(-1))
    (b'\\xac\\x02', 10)
    """
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def number_field(number: int, value: int) -> bytes:
    """A field that is a number."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """A field that is a message or a text."""
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def numbers_message(values: Sequence[int]) -> bytes:
    """A message of one repeated number, not packed, as proto2 writes it."""
    return b"".join(number_field(1, value) for value in values)
