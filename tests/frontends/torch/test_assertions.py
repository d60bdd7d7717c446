"""Models whose code compares counts of its data as numbers: the assertion leaves the graph and
becomes a check.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError, RunError
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch
from autopar.runtime.module.data_assertions import require
from tests.runtime.counting import IMAGE, Counting, example


class Uncheckable(Counting):
    """Asserts something of what its layers make."""

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        made = super().forward(ids, images)
        torch._check((made.sum() < 1e9).item())
        return made


class Shaped(nn.Module):
    """Makes a tensor of as many rows as its data says."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(int((ids == IMAGE).sum().item()), 2)


class Told(nn.Module):
    """Gives a number."""

    def forward(self, ids: Tensor) -> tuple[Tensor, int]:
        return ids.float(), ids.sum().item()  # type: ignore[return-value]


class Multiplied(nn.Module):
    """Computes with a number of its data."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids.float() * ids.max().item()


def test_an_assertion_of_counts_is_a_check_and_no_operator() -> None:
    model = import_torch(Counting(), example())
    (check,) = model.checks
    assert check.checkable and check.place.startswith("counting.py:")
    assert not [op.kind for op in model.graph.operators if "item" in op.kind or "assert" in op.kind]
    ids, images = example()
    require(model.checks, {**model.constants, "ids": ids, "images": images})


def test_the_note_says_where_and_what_becomes_of_it() -> None:
    (note,) = load_model(Counting(), ModelOptions(), example_inputs=example()).notes
    assert note.startswith(
        "the model's code asserts something of its data at counting.py:"
    ) and note.endswith("batch is checked")
    notes = load_model(Uncheckable(), ModelOptions(), example_inputs=example()).notes
    assert [note.rpartition(": ")[2] for note in notes] == [
        "every call's batch is checked",
        "it is not checked, as it needs more than the inputs",
    ]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Shaped(), "cannot capture Shaped"),
        (Told(), "number made of data"),
        (Multiplied(), "gives a number, not a tensor"),
    ],
)
def test_a_number_that_the_model_computes_with_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        import_torch(module, example()[:1])


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_of_images_and_text_is_imported() -> None:
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=32,
    )
    text = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=99, image_seq_length=16
    )
    ids = torch.arange(96).reshape(4, 24) % 90
    ids[:, 2:18] = 99
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(4, 3, 32, 32)}
    model = load_model(
        transformers.LlavaForConditionalGeneration(config), ModelOptions(), example_inputs=inputs
    )
    assert model.torch is not None
    (check,) = model.torch.checks
    assert check.checkable and check.place.startswith("modeling_llava.py:")
    names = dict(zip(model.torch.graph.inputs, inputs.values(), strict=True))
    require(model.torch.checks, names)
    names[model.torch.graph.inputs[0]] = ids.clamp(max=98)
    with pytest.raises(RunError, match=r"modeling_llava\.py"):
        require(model.torch.checks, names)
