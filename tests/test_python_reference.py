"""docs/reference-python.md holds the docstrings of the public names; `python
tests/test_python_reference.py` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autopar
from autopar import errors

WIDTH = 110
PAGE = Path(__file__).parent.parent / "docs" / "reference-python.md"
GROUPS: dict[str, tuple[str, ...]] = {
    "Planning": ("plan", "what_if", "Plan", "Cluster", "summary", "summary_html"),
    "Answers": ("compare", "explain", "report", "estimate_memory"),
    "Other projects": ("convert", "import_plan", "verify"),
    "Running": (
        "parallelize",
        "profile",
        "recalibrated",
        "host_states",
        "local_optimizer",
        "parameters_on_meta",
    ),
    "Training": (
        "train",
        "save",
        "resume",
        "steps",
        "sampler",
        "tokens",
        "elastic",
        "Lamb",
        "Momentum",
        "Muon",
        "SmallAdamW",
    ),
    "Weights": ("export_checkpoint", "export_weights", "import_weights"),
    "Operators of your own": ("register_rule", "discover"),
    "Global tensors": (
        "GlobalTensor",
        "global_tensor",
        "to_global",
        "to_local",
        "from_dtensor",
        "placement",
        "sbp",
        "matmul",
        "ones",
        "randn",
        "zeros",
    ),
    "By context": (
        "set_auto_parallel_context",
        "get_auto_parallel_context",
        "reset_auto_parallel_context",
        "set_context",
        "shard",
        "add_prim_attr",
        "layerwise_parallel",
    ),
    "Communication": ("communication",),
}
HEAD = """# Reference of Python

Every name of `autopar` with its docstring. Times are seconds, sizes bytes and rates per second; a
size may also be a text such as `"80GiB"`. Wrong input raises a class of `autopar.errors` (at the
end), each with an exit code of the command line. The page is made from the code.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [
            f"\n## {title}\n",
            *(text for name in names for text in _entry(f"autopar.{name}", getattr(autopar, name))),
        ]
    parts += ["\n## Errors\n", "| class | exit code | when |\n|---|---|---|\n"]
    classes = [
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, errors.AutoparError)
    ]
    told = {error: _cell((inspect.getdoc(error) or "").partition(">>>")[0]) for error in classes}
    for error in sorted(classes, key=lambda error: (error.exit_code, error.__name__)):
        parts.append(f"| `autopar.errors.{error.__name__}` | {error.exit_code} | {told[error]} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _entry(name: str, documented: Any) -> Iterator[str]:
    if isinstance(documented, ModuleType):
        yield f"\n### `{name}`\n\n{_body(documented)}"
        for inner in getattr(
            documented, "__all__", [n for n in vars(documented) if not n.startswith("_")]
        ):
            value = getattr(documented, inner)
            if callable(value) and getattr(value, "__module__", "").startswith(documented.__name__):
                yield f"\n**`{name}.{inner}{_signature(value)}`**\n\n{_body(value)}"
        return
    yield f"\n### `{name}`\n\n```text\n{_call(name, documented)}\n```\n\n{_body(documented)}"
    if inspect.isclass(documented):
        for inner, value in vars(documented).items():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            held = plain.fget if isinstance(plain, property) else plain
            # Torch writes an inherited `step` into the class of the first optimizer that is made.
            own = inspect.isfunction(plain) and plain.__qualname__.startswith(
                f"{documented.__qualname__}."
            )
            if (
                not inner.startswith("_")
                and (isinstance(plain, property) or own)
                and inspect.getdoc(held)
            ):
                shown = inner if isinstance(plain, property) else f"{inner}{_signature(plain)}"
                yield f"\n**`{shown}`**\n\n{_body(held)}"


def _call(name: str, function: Any) -> str:
    """A call, an argument a line where it is long."""
    parameters, returns = _parts(function)
    text = f"{name}({', '.join(parameters)}){returns}"
    if len(text) <= WIDTH:
        return text
    return "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){returns}"])


def _signature(function: Any) -> str:
    parameters, returns = _parts(function)
    return f"({', '.join(parameters)}){returns}"


def _parts(function: Any) -> tuple[list[str], str]:
    """The parameters as they are written, and what is returned."""
    try:
        if hasattr(function, "model_rebuild"):
            function.model_rebuild()  # a class of pydantic that is built at first use
        signature = inspect.signature(function)
    except ValueError:  # of what is written in C
        return ["..."], ""
    texts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(
            text.startswith("*") for text in texts
        ):
            texts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        texts.append(
            f"{stars}{parameter.name}{kind}"
            + ("" if parameter.default is parameter.empty else f" = {_value(parameter.default)}")
        )
    return (
        texts,
        ""
        if signature.return_annotation is signature.empty
        else f" -> {_type(signature.return_annotation)}",
    )


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(
        r"\b(?:typing|collections\.abc|autopar\.[a-z_.]+|torch(?:\.[a-z_]+)*)\.(?=[A-Z])", "", text
    )


def _value(default: Any) -> str:
    """A default, in short where it is a whole object."""
    text = repr(default)
    return (
        getattr(default, "__name__", type(default).__name__ + "()")
        if " at 0x" in text or len(text) > WIDTH // 3
        else text
    )


def _body(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").replace("\n>>> ", "\n    >>> ") + "\n"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python tests/test_python_reference.py writes it anew"
    )


def test_every_public_name_is_in_a_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(set(listed))
    # Errors are a table of their own at the end.
    assert {*autopar._LAZY, *autopar._MODULES} == {*listed, "errors"}


@pytest.mark.parametrize("name", sorted(name for names in GROUPS.values() for name in names))
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert (inspect.getdoc(getattr(autopar, name)) or "").rstrip().endswith((".", ")"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
