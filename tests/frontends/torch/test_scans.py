"""Linear attention and state spaces of transformers are one operator a layer, with the values and
gradients of the loops that they stand for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from autopar.frontends.torch.scans import SCANS, scans_as_operators
from autopar.ir.bodies import POINTWISE
from tests.frontends.torch.test_experts import Logits
from tests.frontends.torch.test_importer import compare_with_eager

tf = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "layers_block_type": ["mamba", "attention"],
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "dense"],
}
MODELS = {
    "qwen3_next.Qwen3Next": (DELTA | {"mlp_only_layers": [0, 1]}, ["gated_delta_rule"]),
    "qwen3_5.Qwen3_5Text": (DELTA, ["gated_delta_rule"]),
    "nemotron_h.NemotronH": (MAMBA, ["state_space_scan"]),
    "kimi_linear.KimiLinear": (KIMI, ["gated_delta_rule"] * 2),
}


def language_model(name: str) -> nn.Module:
    """A narrow model of two layers."""
    module, _, family = name.partition(".")
    library = import_module(f"transformers.models.{module}")
    configuration = getattr(library, f"{family}Config")(**(COMMON | MODELS[name][0]))
    torch.manual_seed(0)
    return Logits(getattr(library, f"{family.removesuffix('Text')}ForCausalLM")(configuration))


@pytest.mark.parametrize("name", MODELS)
def test_a_mixer_is_one_operator_that_equals_its_loop(name: str) -> None:
    model = language_model(name)
    tokens = torch.randint(0, 64, (2, 70))
    kinds = [op.kind for op in import_torch(model, (tokens,)).graph.operators]
    # Each has a short convolution in front of it.
    wanted = [
        kind
        for scan in MODELS[name][1]
        for kind in ("autopar.causal_conv1d", f"autopar.{scan}.default")
    ]
    others = ("autopar.rotate.default", POINTWISE)
    scans = [kind for kind in kinds if kind.startswith("autopar.") and kind not in others]
    assert scans == wanted
    assert len(kinds) < 300
    compare_with_eager(model, tokens)


def _reference(name: str, function: str) -> Any:
    return getattr(import_module(f"transformers.models.{name}.modeling_{name}"), function)


def _draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def _calls(dtype: torch.dtype) -> dict[str, tuple[Any, list[Tensor], dict[str, Any]]]:
    torch.manual_seed(0)
    q, k, v = (_draw(2, 70, heads, width, dtype=dtype) for heads, width in ((2, 8), (2, 8), (4, 6)))
    own = [_draw(2, 70, 4, 8, dtype=dtype) for _ in range(2)]
    decay = -torch.rand(2, 70, 4, dtype=dtype)
    channels = -torch.rand(2, 70, 4, 8, dtype=dtype)
    beta = torch.rand(2, 70, 4, dtype=dtype)
    heads = [_draw(4, dtype=dtype) for _ in range(2)]
    delta = {"use_qk_l2norm_in_kernel": True}
    scan = [v, decay, -torch.rand(4, dtype=dtype), q, k]
    return {
        "torch_chunk_gated_delta_rule": ("qwen3_next", [q, k, v, decay, beta], delta),
        "chunk_kimi_delta_attention": ("kimi_linear", [*own, v, channels, beta], delta),
        "mamba2_chunk_scan": (
            "nemotron_h",
            [*scan, *heads],
            {"chunk_size": 32, "dt_softplus": True},
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", SCANS)
def test_an_operator_has_the_values_and_gradients_of_its_loop(
    function: str, dtype: torch.dtype
) -> None:
    name, tensors, options = _calls(dtype)[function]

    def results() -> list[Tensor]:
        given = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        more = dict(zip(("D", "dt_bias"), given[5:], strict=False))
        made = _reference(name, function)(*given[:5], **more, **options)
        made = made[0] if isinstance(made, tuple) else made
        weights = torch.linspace(0.5, 1.5, made.numel(), dtype=made.dtype).view(made.shape)
        return [made.float(), *torch.autograd.grad((made * weights).sum(), given)]

    wanted = results()
    with scans_as_operators(nn.Module()):
        actual = results()
    for left, right in zip(actual, wanted, strict=True):
        torch.testing.assert_close(left.float(), right.float(), atol=1e-4, rtol=1e-4)


def test_a_call_that_the_operator_cannot_express_runs_the_loop_and_all_is_restored() -> None:
    function = "torch_chunk_gated_delta_rule"
    original = _reference("qwen3_next", function)
    _, tensors, options = _calls(torch.float32)[function]
    holder = nn.Module()
    object.__setattr__(holder, "rule", original)
    with pytest.raises(KeyError), scans_as_operators(holder):
        assert vars(holder)["rule"] is not original
        _, state = vars(holder)["rule"](*tensors, **options, output_final_state=True)
        assert state is not None
        raise KeyError
    assert _reference("qwen3_next", function) is original
    assert vars(holder)["rule"] is original
