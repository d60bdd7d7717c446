"""The report: one file of HTML with pictures and tables of a plan, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import Environment
from markupsafe import Markup

from autopar.printable import printable

from .contents import Compared, Contents

__all__ = ["Compared", "Contents", "page"]


def page(contents: Contents) -> str:
    """The text of the file.

    Its policy allows only the style and the script inside, by their hashes.
    """
    style, script, template = (
        _resource(name) for name in ("style.css", "script.js", "template.html")
    )
    # Names in a plan may come from strangers. If one of them ever became markup, the browser would
    # still run and load nothing.
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri "
        "'none'; form-action 'none'"
    )
    environment = Environment(
        autoescape=True, finalize=_finalize, trim_blocks=True, lstrip_blocks=True
    )
    drawn = environment.from_string(template)
    return (
        drawn.render(page=contents, style=Markup(style), script=Markup(script), policy=policy)
        + "\n"
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _finalize(value: object) -> object:
    """A value with the control characters of names spelled out.

    Jinja escapes the markup afterwards.
    """
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
