"""Hostile `.pt2` files: none of what they hold is executed, they stay small, and what they get is
one sentence and exit code 3.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive import constants

import autopar
from autopar.errors import AutoparError, ModelError
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import read_archive
from tests.frontends.torch.archives import (
    CONSTANTS,
    PROGRAM,
    SAMPLES,
    WEIGHTS,
    Files,
    files_of,
    legacy,
    pickled,
    save,
    with_pickled_state,
    written,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "m.pt2")


@pytest.fixture
def files(saved: Path) -> Files:
    return files_of(saved)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_code(self.marker),)


def _code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def _edited(files: Files, name: str, edit: Callable[[Any], None]) -> Files:
    data = json.loads(files[name])
    edit(data)
    return files | {name: json.dumps(data).encode()}


def _texts(value: Any, edit: Callable[[str], str]) -> Any:
    """The same JSON with its texts (not its keys) edited."""
    if isinstance(value, dict):
        return {edit(key): _texts(inner, edit) for key, inner in value.items()}
    if isinstance(value, list):
        return [_texts(inner, edit) for inner in value]
    return edit(value) if isinstance(value, str) else value


def _everywhere(files: Files, old: str, new: str) -> Files:
    return files | {
        PROGRAM: json.dumps(
            _texts(json.loads(files[PROGRAM]), lambda text: new if text == old else text)
        ).encode()
    }


def _pickled_weight(files: Files, marker: Path) -> Files:
    config = json.loads(files[WEIGHTS])
    meta = config["config"]["turned"]
    meta["use_pickle"] = True
    return files | {
        WEIGHTS: json.dumps(config).encode(),
        f"m/data/weights/{meta['path_name']}": pickled([Payload(marker)]),
    }


def _object(files: Files, prefix: str, content: bytes) -> Files:
    """A constant that is no tensor."""
    config = json.loads(files[CONSTANTS])
    config["config"]["more"] = {
        "path_name": f"{prefix}0",
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    return files | {CONSTANTS: json.dumps(config).encode(), f"m/data/constants/{prefix}0": content}


def _expression(files: Files, marker: Path) -> Files:
    def edit(data: Any) -> None:
        sizes = data["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0] = {"as_expr": {"expr_str": f"exec({_code(marker)!r})", "hint": {"as_int": 4}}}

    return _edited(files, PROGRAM, edit)


def _target(files: Files, text: str) -> Files:
    return _edited(
        files, PROGRAM, lambda data: data["graph_module"]["graph"]["nodes"][-1].update(target=text)
    )


def _spec(files: Files, kind: str, context: Any) -> Files:
    def edit(data: Any) -> None:
        call = data["graph_module"]["module_call_graph"][0]["signature"]
        call["out_spec"] = json.dumps(
            [1, {"type": kind, "context": json.dumps(context), "children_spec": []}]
        )

    return _edited(files, PROGRAM, edit)


HOSTILE: dict[str, tuple[Callable[[Files, Path], Files], str, bool]] = {
    # name: the file; words of the refusal ("" where it is harmless once the payload is left out);
    # whether torch itself runs the payload
    "sample inputs": (
        lambda files, marker: files | {SAMPLES: pickled(((Payload(marker),), {}))},
        "",
        True,
    ),
    "sample inputs of 2.7": (
        lambda files, marker: legacy(files, samples=pickled(((Payload(marker),), {}))),
        "",
        True,
    ),
    "state of 2.7": (
        lambda files, marker: legacy(files, state={"one.weight": Payload(marker)}),
        "state_dict.pt' pickles more",
        True,
    ),
    "pickled state": (
        lambda files, marker: with_pickled_state(files, {"one.weight": Payload(marker)}),
        "pickles more than",
        True,
    ),
    "a pickled weight": (_pickled_weight, "values of 'turned' are pickled", True),
    "a pickled constant": (
        lambda files, marker: _object(files, "opaque_obj_", pickle.dumps(Payload(marker))),
        "values of 'more'",
        # Torch 2.11 knows no such constants, and leaves them alone.
        hasattr(constants, "OPAQUE_OBJ_FILENAME_PREFIX"),
    ),
    "a script object": (
        lambda files, marker: _object(files, "custom_obj_", b"x"),
        "values of 'more' are pickled",
        False,
    ),
    "an expression": (_expression, "the size of 'x' is an expression", True),
    "source code in a name": (
        lambda files, marker: _everywhere(files, "x", f"x={_code(marker)}"),
        "which is no identifier",
        True,
    ),
    "source code in an argument": (
        lambda files, marker: _everywhere(files, "y", f"y={_code(marker)}"),
        "which is no identifier",
        False,
    ),
    "source code in a parameter": (
        lambda files, marker: _everywhere(files, "turned", f"a'+{_code(marker)}+'"),
        "names a parameter",
        False,
    ),
    "a function of torch": (
        lambda files, marker: _target(files, "torch.os.system"),
        "'torch.os.system', which is no operator",
        False,
    ),
    "a function of operator": (
        lambda files, marker: _target(files, "_operator.attrgetter"),
        "no operator of torch.ops",
        False,
    ),
    "a method of torch.ops": (
        lambda files, marker: _target(files, "torch.ops.load_library"),
        "no operator of torch.ops",
        False,
    ),
    "an operator that reads files": (
        lambda files, marker: _target(files, "torch.ops.aten.from_file.default"),
        "writes files",
        False,
    ),
    "an operator that makes no tensor": (
        lambda files, marker: _target(files, "torch.ops.aten.warn.default"),
        "not make tensors",
        False,
    ),
    "an unknown operator": (
        lambda files, marker: _target(files, "torch.ops.nosuch.op.default"),
        "is not known here; --rules",
        False,
    ),
    "control flow": (
        lambda files, marker: _target(files, "torch.ops.higher_order.cond"),
        "control flow inside a model",
        False,
    ),
    "a kernel": (
        lambda files, marker: _target(
            files, "torch.ops.higher_order.triton_kernel_wrapper_functional"
        ),
        "region",
        False,
    ),
    "a class by name": (
        lambda files, marker: _spec(
            files, "collections.defaultdict", {"default_factory_module": "os"}
        ),
        "no tuple",
        False,
    ),
    "an enum by name": (
        lambda files, marker: _spec(files, "builtins.dict", [{"__enum__": True, "fqn": "this:x"}]),
        "the keys of",
        False,
    ),
    "a library": (
        lambda files, marker: files | {"m/data/aotinductor/model/a.so": b"\x7fELF"},
        "",
        False,
    ),
    "a path upwards": (
        lambda files, marker: files | {"m/../../up": b"x"},
        "an entry is named",
        False,
    ),
    "an absolute path": (
        lambda files, marker: {"/etc" + name: content for name, content in files.items()},
        "an entry is named",
        False,
    ),
    "a weight elsewhere": (
        lambda files, marker: _edited(
            files,
            WEIGHTS,
            lambda data: data["config"]["turned"].update(path_name="../../models/model.json"),
        ),
        "the file of 'turned' is",
        False,
    ),
    "a weight past its bytes": (
        lambda files, marker: _edited(
            files,
            WEIGHTS,
            lambda data: data["config"]["turned"]["tensor_meta"].update(
                storage_offset={"as_int": 2**40}
            ),
        ),
        "storage",
        False,
    ),
    "a GPU": (
        lambda files, marker: _edited(
            files,
            PROGRAM,
            lambda data: data["graph_module"]["graph"]["tensor_values"]["x"].update(
                device={"type": "cuda", "index": 0}
            ),
        ),
        "lie on a GPU",
        False,
    ),
    "symbols without number": (
        lambda files, marker: _edited(
            files,
            PROGRAM,
            lambda data: data.update(
                range_constraints={f"u{10**15}": {"min_val": 0, "max_val": 1}}
            ),
        ),
        "",
        False,
    ),
    "two folders": (
        lambda files, marker: files | {"other/archive_format": b"pt2"},
        "do not lie in one folder",
        False,
    ),
    "no program": (
        lambda files, marker: {name: content for name, content in files.items() if name != PROGRAM},
        "models/model.json",
        False,
    ),
    "deep": (lambda files, marker: files | {PROGRAM: b"[" * 100_000}, "no JSON", False),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(
    name: str, files: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build, words, runs = HOSTILE[name]
    if name == "a GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    marker = tmp_path / "marker"
    path = written(build(copy.deepcopy(files), marker), tmp_path / "m.pt2")
    if words:
        with pytest.raises(ModelError, match=words) as caught:
            load_model(path, ModelOptions())
        assert (
            caught.value.exit_code == 3
            and str(caught.value).startswith(str(path))
            and len(str(caught.value)) < 1000
        )
    else:
        load_model(path, ModelOptions())
    shown = capfd.readouterr()
    assert not marker.exists() and "Traceback" not in shown.err + shown.out
    if runs:  # the payload is one: torch, or trust, does run it
        try:
            load_model(path, ModelOptions(trust=True))
        except AutoparError as error:
            assert str(error).startswith(str(path))
        assert marker.exists() and "Traceback" not in capfd.readouterr().err


def test_all_that_needs_trust_is_named(files: Files, tmp_path: Path) -> None:
    path = written(
        _object(_pickled_weight(files, tmp_path / "marker"), "opaque_obj_", b"x"),
        tmp_path / "m.pt2",
    )
    with pytest.raises(
        ModelError,
        match=(r"'turned' are pickled; the values of 'more' are pickled\. .* give trust=True if"),
    ):
        autopar.plan(path, devices=2, cluster="local-cpu")


def test_a_bomb_stays_small(files: Files, tmp_path: Path) -> None:
    bomb = files | {"m/data/weights/weight_0": bytes(2**28)}
    path = written(bomb, tmp_path / "m.pt2", zipfile.ZIP_DEFLATED)
    del bomb
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"is compressed, which torch.export.save never does"):
        read_archive(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_entries_that_share_their_bytes(files: Files, tmp_path: Path) -> None:
    """Many entries of the directory point at the same bytes: together they are larger than the
    file.
    """
    path = written({"m/a": bytes(2**16)}, tmp_path / "m.pt2")
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    entry = content[start : content.index(b"PK\x05\x06")]
    end = content[content.index(b"PK\x05\x06") :]
    names = [f"m/{letter}".encode() for letter in "abcdefgh"]
    directory = b"".join(entry.replace(b"m/a", name) for name in names)
    tail = (
        end[:8]
        + len(names).to_bytes(2, "little") * 2
        + len(directory).to_bytes(4, "little")
        + end[16:]
    )
    path.write_bytes(content[:start] + directory + tail)
    with pytest.raises(ModelError, match="overlap"):
        read_archive(str(path))


def _mutants(content: bytes, count: int) -> Iterator[bytes]:
    for seed in range(count):
        draw = random.Random(seed)
        mutant = bytearray(content)
        for _ in range(draw.choice((1, 4, 32))):
            mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        yield bytes(mutant[: draw.randrange(len(mutant))] if seed % 5 == 0 else mutant)


def test_mutated_and_truncated_files(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = 0
    for mutant in _mutants(saved.read_bytes(), 50):
        (tmp_path / "m.pt2").write_bytes(mutant)
        try:
            read_archive(str(tmp_path / "m.pt2"))
        except ModelError:
            refused += 1
    assert refused > 30 and "Traceback" not in capfd.readouterr().err


def test_mutated_programs(files: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Texts and numbers of the program are exchanged for others of it, under checksums that are
    right.
    """
    refused = 0
    for seed in range(50):
        draw = random.Random(seed)
        name = draw.choice((PROGRAM, PROGRAM, WEIGHTS))
        data = json.loads(files[name])
        places = list(_places(data))
        for _ in range(draw.choice((1, 1, 3))):
            holder, key = draw.choice(places)
            other, theirs = draw.choice(places)
            holder[key] = draw.choice(
                (copy.deepcopy(other[theirs]), None, -1, 2**70, "", "a b", {})
            )
        written(files | {name: json.dumps(data).encode()}, tmp_path / "m.pt2")
        try:
            autopar.plan(tmp_path / "m.pt2", devices=2, cluster="local-cpu")
        except AutoparError:
            refused += 1
    assert refused > 20 and "Traceback" not in capfd.readouterr().err


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def test_the_command(files: Files, tmp_path: Path) -> None:
    """One line on stderr, and exit code 3."""
    path = written(_pickled_weight(files, tmp_path / "marker"), tmp_path / "m.pt2")
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "plan", str(path), "--devices", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3 and not done.stdout
    assert done.stderr.count("\n") == 1 and "--trust" in done.stderr
    assert not (tmp_path / "marker").exists()
