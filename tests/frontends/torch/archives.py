"""Files as `torch.export.save` writes them, taken apart, changed and put together again."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Files = dict[str, bytes]
PROGRAM = "m/models/model.json"
WEIGHTS = "m/data/weights/model_weights_config.json"
CONSTANTS = "m/data/constants/model_constants_config.json"
SAMPLES = "m/data/sample_inputs/model.pt"


class Net(nn.Module):
    """Parameters (tied, transposed, frozen), buffers, a constant, a region without gradients,
    keyword arguments, nested outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.two.weight = self.one.weight
        self.turned = nn.Parameter(torch.rand(6, 8).t())
        self.norm.bias.requires_grad_(False)
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            z = x * 2
        made = (
            self.norm(self.two(torch.relu(self.one(x))))
            + z
            + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        )
        return {
            "made": made @ self.turned,
            "more": [made.sum(), self.none.sum() + y.div(3, rounding_mode="floor").mean()],
        }


class Mean(nn.Module):
    """One layer, whose inputs stand in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, pair: list[Tensor]) -> Tensor:
        return self.layer(pair[0] + pair[1]).mean()


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> torch.export.ExportedProgram:
    return torch.export.export(module, args, kwargs or {})


def written(files: Files, path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def save(path: Path) -> Path:
    """The file of `Net`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.export.save(exported(Net(), (torch.rand(4, 8),), {"y": torch.rand(4)}), path)
    return path


def files_of(path: Path) -> Files:
    """The contents of a file, by name."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def legacy(files: Files, *, state: Any = None, samples: bytes = b"") -> Files:
    """The same program in the layout of torch 2.7, where the state is pickled."""
    program = json.loads(files[PROGRAM])
    loaded = torch.export.load(io.BytesIO(_bytes(files)))
    major, minor = program["schema_version"].values()
    return {
        "version": f"{major}.{minor}".encode(),
        "serialized_exported_program.json": files[PROGRAM],
        "serialized_state_dict.pt": pickled(dict(loaded.state_dict) if state is None else state),
        "serialized_constants.pt": pickled(dict(loaded.constants)),
        "serialized_example_inputs.pt": samples or files[SAMPLES],
    }


def _bytes(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_pickled_state(files: Files, state: Any) -> Files:
    kept = {
        name: content for name, content in files.items() if not name.startswith("m/data/weights/")
    }
    return kept | {"m/data/weights/model.pt": pickled(state)}
