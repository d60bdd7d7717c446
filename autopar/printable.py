"""Names from files, made safe for a terminal.

Characters that move its cursor, colour or reverse text are escaped.
"""

from __future__ import annotations


def printable(text: str, *, lines: bool = True) -> str:
    r"""The text with control, format and undecodable characters escaped.

    Ends of lines stay where `lines` are meant.

    >>> printable("a\x1b[31m\u202e\udc80\nb × 2"), printable("a\nb", lines=False)
    ('a\\x1b[31m\\u202e\\udc80\nb × 2', 'a\\nb')
    """
    if text.isprintable():
        return text
    unescaped = "\n\u00a0" if lines else "\u00a0"
    return "".join(
        c if c.isprintable() or c in unescaped else c.encode("unicode_escape").decode("ascii")
        for c in text
    )
