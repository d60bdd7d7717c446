"""`.pt2` files that `torch.export.save` writes load as torch loads them, of this version and of
older ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import run
from autopar.errors import ModelError
from autopar.frontends.torch import read_archive
from tests.frontends.torch.archives import (
    WEIGHTS,
    Files,
    Mean,
    exported,
    files_of,
    legacy,
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


def test_what_torch_saves_loads_as_torch_loads_it(saved: Path) -> None:
    wanted = torch.export.load(saved)
    module, actual = read_archive(str(saved))
    theirs = wanted.module()
    for mine, other in (
        (module.named_parameters(), theirs.named_parameters()),
        (module.named_buffers(), theirs.named_buffers()),
    ):
        own = dict(mine)
        for name, value in other:
            assert (
                torch.equal(own.pop(name), value)
                and value.requires_grad == own.get(name, value).requires_grad
            )
        assert not own
    assert dict(module.named_parameters())["turned"].stride() == (1, 8)
    assert isinstance(wanted.example_inputs, tuple)
    args, kwargs = wanted.example_inputs
    made = module(*args, **kwargs)
    expected = theirs(*args, **kwargs)
    torch.testing.assert_close(made, expected)
    assert actual.graph.inputs == ("x", "y") and actual.graph.tensors["turned"].trainable
    assert not actual.graph.tensors["norm.bias"].trainable


def test_it_is_planned_and_run(saved: Path, tmp_path: Path) -> None:
    assert autopar.plan(saved, devices=2, cluster="local-cpu", trust=True) == autopar.plan(
        saved, devices=2, cluster="local-cpu"
    )
    model = tmp_path / "m.pt2"
    plan = tmp_path / "plan.json"
    torch.export.save(
        exported(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.rand(4, 8),)), model
    )
    run(
        ["plan", str(model), "--devices", "2", "--cluster", "local-cpu", "--quiet", "-o", str(plan)]
    )
    run(["run", str(plan), "--model", str(model), "--check"])


def test_a_list_of_inputs(tmp_path: Path) -> None:
    path = tmp_path / "mean.pt2"
    pair = [torch.rand(4, 8), torch.rand(4, 8)]
    program = exported(Mean(), (pair,))
    torch.export.save(program, path)
    assert torch.equal(read_archive(str(path))[0](pair), program.module()(pair))


def test_open_sizes_are_refused_as_before(tmp_path: Path) -> None:
    """A model with an open batch cannot be planned, with or without trust; nothing of its
    expressions is evaluated.
    """
    path = tmp_path / "open.pt2"
    torch.export.save(
        torch.export.export(
            nn.Linear(8, 8), (torch.rand(4, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},)
        ),
        path,
    )
    with pytest.raises(
        ModelError,
        match=r"the size of '.*' is an expression; export the model again with fixed sizes",
    ):
        read_archive(str(path))
    with pytest.raises(ModelError, match="has a size that depends on data"):
        read_archive(str(path), trust=True)


def test_weights_that_were_never_made(files: Files, tmp_path: Path) -> None:
    """A program that was exported without values is planned; its weights lie on the meta device."""
    config = json.loads(files[WEIGHTS])["config"]
    entry = "m/data/weights/" + config["turned"]["path_name"]
    module, _ = read_archive(str(written(files | {entry: b""}, tmp_path / "m.pt2")))
    assert dict(module.named_parameters())["turned"].is_meta


@pytest.mark.parametrize("layout", ["2.7", "pickled state"])
def test_older_layouts(layout: str, files: Files, saved: Path, tmp_path: Path) -> None:
    wanted = torch.export.load(saved)
    old = legacy(files) if layout == "2.7" else with_pickled_state(files, dict(wanted.state_dict))
    module, _ = read_archive(str(written(old, tmp_path / "old.pt2")))
    for name, value in wanted.state_dict.items():
        assert torch.equal(dict([*module.named_parameters(), *module.named_buffers()])[name], value)
