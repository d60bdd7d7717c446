"""Names and shapes of schemes: what is read, and what is refused with what would do."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.planning.model.request import Request
from autopar.schemes import AXIS_SCHEMES, SCHEMES, scheme_named
from autopar.schemes.pinning import pinned, stage_mesh, storable
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.report_models import perceptrons


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    shape = Shape(layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=128, sequence=32)
    return analyse(transformer(shape, batch=8).graph, train=True)


def request(devices: int, **pins: object) -> Request:
    return Request(cluster=load_cluster("dgx-h100").sized(devices), **pins)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scheme, devices, message",
    [
        ("2d", 8, r"q x q devices: 4 \(2x2\) or 9 \(3x3\), not 8"),
        ("2.5d", 16, r"8 \(2x2x2\) or 18 \(2x3x3\), not 16"),
        ("3d", 9, r"8 \(2x2x2\) or 27 \(3x3x3\), not 9"),
        ("gpt3-64x6x8", 8, "64 equal stages"),
        ("p2d2t2", 16, "is for 8 devices, not 16"),
        ("expert", 4, "the model has no experts"),
        ("ulysses", 8, "'layers.0.attention.core' cannot be split along its heads over 8 devices"),
        ("megatron", 8, "'layers.0.attention.core' cannot be split along its heads over 8 devices"),
        ("data", 16, "along its batch over 16 devices"),
        ("data", 3, "along its batch over 3 devices"),
        ("pipeline-1f1b 3 x data 2", 8, "3 equal stages"),
    ],
)
def test_what_is_impossible_is_told(
    scheme: str, devices: int, message: str, analysis: Analysis
) -> None:
    with pytest.raises(UsageError, match=message):
        pinned(request(devices), scheme_named(scheme), analysis)


@pytest.mark.parametrize(("scheme", "devices"), [("3d", 8), ("hidden", 2)])
def test_a_hidden_dim_needs_a_normalisation(scheme: str, devices: int) -> None:
    graph = load_model(perceptrons(2, 16), ModelOptions()).graph
    with pytest.raises(UsageError, match=r"normalisation .* tells apart, and the model has none"):
        pinned(request(devices), scheme_named(scheme), analyse(graph, train=True))


@pytest.mark.parametrize(
    "text",
    [
        "dta",
        "4x4",
        "data 4 y megatron 2",
        "p2d2",
        "0x1x1",
        "data 2 (zero1) x zero3 2",
        "rank0:zero1,rank1:zero3",
    ],
)
def test_bad_names(text: str) -> None:
    with pytest.raises(UsageError):
        scheme_named(text)


def test_every_name_is_known() -> None:
    assert {name: scheme_named(name).name for name in (*SCHEMES, *AXIS_SCHEMES)} == {
        name: name for name in (*SCHEMES, *AXIS_SCHEMES)
    }
    assert all(scheme.words for scheme in SCHEMES.values())


@pytest.mark.parametrize(
    "scheme, devices, shape",
    [
        ("2d", 16, (4, 4)),
        ("2.5d", 32, (2, 4, 4)),
        ("3d", 27, (3, 3, 3)),
        ("context", 8, (8,)),
        ("p2d2t4", 16, (2, 4)),
        ("data 3 x megatron 2", 6, (3, 2)),
    ],
)
def test_the_wanted_mesh(scheme: str, devices: int, shape: tuple[int, ...]) -> None:
    actual = scheme_named(scheme)
    assert actual.mesh_sizes(devices // (actual.stages or 1)) == shape


def test_a_pipeline_takes_as_many_stages_as_there_are_layers(analysis: Analysis) -> None:
    assert [
        pinned(request(n), SCHEMES["pipeline-1f1b"], analysis).stages for n in (2, 4, 8, 16)
    ] == [2, 4, 4, 4]
    asked = pinned(request(8, stages=2), SCHEMES["pipeline-gpipe"], analysis)
    assert (asked.stages, asked.schedule, asked.zero) == (2, "gpipe", 0)


def test_what_the_request_fixes_holds(analysis: Analysis) -> None:
    mesh = stage_mesh(load_cluster("dgx-h100").sized(8), (2, 2, 2))
    plan = pinned(request(8, mesh=mesh, zero=1), scheme_named("3d"), analysis)
    assert plan.mesh == mesh and plan.zero == 1 and not plan.fewer
    with pytest.raises(UsageError, match="3 mesh axes"):
        pinned(
            request(8, mesh=stage_mesh(load_cluster("dgx-h100").sized(8), (8,))),
            scheme_named("3d"),
            analysis,
        )


def test_micro_batches_count(analysis: Analysis) -> None:
    """A batch of 8 splits over 8 devices, a micro-batch of 4 does not."""
    assert pinned(request(8), SCHEMES["data"], analysis).stages == 1
    with pytest.raises(UsageError, match="along its batch"):
        pinned(request(8, micro_batches=2), SCHEMES["data"], analysis)


def test_a_stage_mesh_lies_inside_the_stages() -> None:
    mesh = stage_mesh(load_cluster("dgx-h100").sized(3072), (6, 8), 64)
    assert (
        mesh.shape == (6, 8) and mesh.axes[1].level == "nvlink" and mesh.axes[0].level != "nvlink"
    )
    with pytest.raises(UsageError, match="2 stages of a mesh of 4 does not have 16 devices"):
        stage_mesh(load_cluster("dgx-h100").sized(16), (4,), 2)


def test_named_axes_choose_among_the_meshes_that_have_them(analysis: Analysis) -> None:
    plan = pinned(request(16), scheme_named("node:data,gpu:data"), analyse_wide())
    assert plan.mesh is None and plan.limits is not None
    with pytest.raises(UsageError, match="no axis 'rack'"):
        pinned(request(16), scheme_named("rack:data"), analysis)


def analyse_wide(batch: int = 16) -> Analysis:
    shape = Shape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=128, sequence=32)
    return analyse(transformer(shape, batch=batch).graph, train=True)


@pytest.mark.parametrize(
    ("text", "sizes", "storage"),
    [
        ("data 24 (zero3)", (3, 8), ("whole", "split")),
        ("data 24 (zero1)", (3, 8), ("whole", "split")),
        ("data 16 (zero3)", (16,), ("split",)),
        ("data 24", (24,), ("whole",)),
        ("data 7 (zero3)", (7,), ("split",)),
        ("data 6 (zero3) x megatron 4", (3, 2, 4), ("whole", "split", "used")),
    ],
)
def test_parameters_are_split_over_as_many_devices_as_they_divide_over(
    text: str, sizes: tuple[int, ...], storage: tuple[str, ...]
) -> None:
    """All dims are powers of two, so that the rest of an axis has the same shards again."""
    scheme = scheme_named(text)
    actual = storable(scheme, analyse_wide())
    assert actual.sizes == sizes
    assert tuple(axis.storage for axis in actual.axes) == storage
    assert {axis.name for axis in actual.axes} == {axis.name for axis in scheme.axes}
    assert (actual.zero, actual.stages, actual.pipeline) == (scheme.zero, None, None)


def test_a_plan_has_the_mesh_of_its_shards() -> None:
    """As many of 24 devices as parameters divide over, which are neighbours."""
    plan = pinned(request(24), scheme_named("data 24 (zero3)"), analyse_wide(batch=24))
    assert plan.mesh is not None and plan.mesh.shape == (3, 8)
    assert plan.mesh.axes[1].level == "nvlink"
