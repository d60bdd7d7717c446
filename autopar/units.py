"""Seconds, bytes and rates as text with units; inside the package all are plain numbers."""

from __future__ import annotations

import re

from .errors import UsageError

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, option: str) -> float:
    """Read an amount of memory; without a unit it is bytes.

    >>> parse_bytes("80GiB", "--memory"), parse_bytes("1.5 gb", "--memory")
    (85899345920.0, 1500000000.0)
    >>> parse_bytes("4096", "--memory")
    4096.0
    """
    match = _AMOUNT.fullmatch(text)
    units = {name.lower(): factor for name, factor in BYTE_UNITS.items()}
    if match is None or (match[2] or "B").lower() not in units:
        raise UsageError(
            f"{option} {text!r} is no amount of memory: give bytes, or a number and one of "
            f"{', '.join(BYTE_UNITS)}"
        )
    nbytes = float(match[1]) * units[(match[2] or "B").lower()]
    if not 0 < nbytes < float("inf"):
        raise UsageError(f"{option} {text!r} must be above 0")
    return nbytes


def parse_count(text: str, option: str) -> float:
    """Read a count, in full or with the letter of a power of a thousand.

    >>> parse_count("1T", "--tokens"), parse_count("300b", "--tokens"), parse_count("2e9", "-")
    (1000000000000.0, 300000000000.0, 2000000000.0)
    """
    letters = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"{option} {text!r} is no count: give 1T, 300B, 500M or the whole number")
    return float(match[1]) * letters[match[2].upper()]


def parse_rate(value: float | str, usual: float, what: str) -> float:
    """A bandwidth as a factor of the usual one: a number, "2x", or a rate such as "100GB/s".

    >>> parse_rate(0.5, 1e9, "link"), parse_rate("2x", 1e9, "link")
    (0.5, 2.0)
    >>> parse_rate("4 GB/s", 1e9, "link")
    4.0
    """
    if not isinstance(value, str):
        factor = float(value)
    elif value.strip().lower().endswith("b/s"):
        factor = parse_bytes(value.strip()[:-2], what) / usual
    else:
        match = _AMOUNT.fullmatch(value)
        if match is None or match[2].lower() not in ("", "x"):
            raise UsageError(
                f"{what} {value!r} is no speed: give a factor such as 0.5 or 2x, or a rate such as "
                "100GB/s"
            )
        factor = float(match[1])
    if not 0 < factor < float("inf"):
        raise UsageError(f"{what} {value!r} must be above 0")
    return factor


def seconds_text(seconds: float) -> str:
    """Seconds with a unit and three digits.

    >>> seconds_text(0.0077539), seconds_text(2.5e-5), seconds_text(12.0), seconds_text(0.0)
    ('7.75 ms', '25.0 us', '12.0 s', '0')
    """
    if seconds == 0:
        return "0"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if seconds >= factor * 0.9995:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{seconds:.2g} s"


def bytes_text(nbytes: float) -> str:
    """Bytes with a binary unit and three digits.

    >>> bytes_text(889807924), bytes_text(80 * 2**30), bytes_text(12)
    ('849 MiB', '80.0 GiB', '12 B')
    """
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= factor * 0.9995:
            return f"{_three_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(rate: float, unit: str) -> str:
    """A rate with a decimal prefix, as data sheets give it.

    >>> rate_text(989.4e12, "FLOP/s"), rate_text(4.5e11, "B/s")
    ('989 TFLOP/s', '450 GB/s')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= factor * 0.9995:
            return f"{_three_digits(rate / factor)} {prefix}{unit}"
    return f"{_three_digits(rate)} {unit}"


def count_text(count: float) -> str:
    """A count in words, with four digits.

    >>> count_text(8030261248), count_text(541_400), count_text(671_026_419_200), count_text(999)
    ('8.030 billion', '541.4 thousand', '671.0 billion', '999')
    """
    for factor, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= factor * 0.99995:
            value = count / factor
            digits = sum(value < most for most in (9.9995, 99.995, 999.95))
            return f"{value:.{digits}f} {word}"
    return f"{count:.0f}"


def amount_text(value: float) -> str:
    """An amount without an exponent.

    >>> amount_text(541400.3), amount_text(12.345), amount_text(0.01234)
    ('541,400', '12.3', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _three_digits(value: float) -> str:
    """Three digits, without an exponent.

    >>> _three_digits(7.754), _three_digits(77.54), _three_digits(1234.5)
    ('7.75', '77.5', '1234')
    """
    digits = 0
    if value < 9.995:
        digits = 2
    elif value < 99.95:
        digits = 1
    return f"{value:.{digits}f}"
