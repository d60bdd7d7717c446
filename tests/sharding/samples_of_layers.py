"""Sample calls of what layers are made of: images, normalisations, attention, recurrence,
quantisation, losses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.ao.quantization.fx._decomposed

from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import bools, f, ints, n
from tests.sharding.values import by_order, single


def images() -> Iterator[Sample]:
    """Pools with places, resampling, transposed convolutions."""
    for d in (1, 2, 3):
        space = (4,) * d
        for lead in ((6, 6), (6,)):
            note = f"{d}d {len(lead)}"
            yield sample(
                f"aten.max_pool{d}d_with_indices.default",
                note,
                self=n(*lead, *space),
                kernel_size=[2] * d,
                stride=[2] * d,
            )
            yield sample(
                f"aten.adaptive_max_pool{d}d.default",
                note,
                self=n(*lead, *space),
                output_size=[2] * d,
            )
            if d > 1:
                yield sample(
                    f"aten._adaptive_avg_pool{d}d.default",
                    note,
                    self=n(*lead, *space),
                    output_size=[2] * d,
                )
        kinds = [f"upsample_nearest{d}d", f"_upsample_nearest_exact{d}d"]
        kinds += [
            ["upsample_linear1d"],
            [
                "upsample_bilinear2d",
                "upsample_bicubic2d",
                "_upsample_bilinear2d_aa",
                "_upsample_bicubic2d_aa",
            ],
            ["upsample_trilinear3d"],
        ][d - 1]
        for name in kinds:
            how = {} if "nearest" in name else {"align_corners": False}
            for size in (8, 12, 6, 3):
                sizes = (6,) * (d - 1) + (4,)
                yield by_order(
                    f"aten.{name}.default",
                    f"to {size}",
                    n(6, 6, *sizes),
                    [12] * (d - 1) + [size],
                    **how,
                )
            yield sample(
                f"aten.{name}.vec",
                "twice",
                input=n(6, 6, *space),
                output_size=None,
                scale_factors=[2.0] * d,
                **how,
            )
            yield sample(
                f"aten.{name}.vec",
                "odd",
                input=n(6, 6, *space),
                output_size=None,
                scale_factors=[1.5] * d,
                **how,
            )
        place = {
            "stride": [2] * d,
            "padding": [1] * d,
            "output_padding": [1] * d,
            "dilation": [1] * d,
        }
        kind = f"aten.conv_transpose{d}d." + ("default" if d == 1 else "input")
        window = (3,) * d
        small = (2,) * d
        yield sample(
            kind,
            f"{d}d",
            input=n(6, 6, *small),
            weight=n(6, 12, *window),
            bias=n(12),
            groups=1,
            **place,
        )
        yield sample(
            kind,
            f"{d}d no bias",
            input=n(6, 6, *small),
            weight=n(6, 6, *window),
            bias=None,
            groups=1,
            **place,
        )
        yield sample(
            kind,
            f"{d}d groups",
            input=n(2, 12, *small),
            weight=n(12, 2, *window),
            bias=n(12),
            groups=6,
            **place,
        )
        yield sample(
            kind,
            f"{d}d depthwise",
            input=n(2, 6, *small),
            weight=n(6, 1, *window),
            bias=n(6),
            groups=6,
            **place,
        )
        yield sample(
            kind,
            f"{d}d one image",
            input=n(6, *small),
            weight=n(6, 6, *window),
            bias=n(6),
            groups=1,
            **place,
        )
        for name in ("convolution", "_convolution"):
            more = (
                {
                    "benchmark": False,
                    "deterministic": True,
                    "cudnn_enabled": False,
                    "allow_tf32": False,
                }
                if name[0] == "_"
                else {}
            )
            given = {"transposed": True, "groups": 1, **place, **more}
            yield sample(
                f"aten.{name}.default",
                f"{d}d back",
                input=n(6, 6, *small),
                weight=n(6, 12, *window),
                bias=n(12),
                **given,
            )
            given |= {"transposed": False, "output_padding": [0] * d}
            yield sample(
                f"aten.{name}.default",
                f"{d}d",
                input=n(6, 6, *space),
                weight=n(12, 6, *window),
                bias=n(12),
                **given,
            )
            given |= {"groups": 6}
            yield sample(
                f"aten.{name}.default",
                f"{d}d groups",
                input=n(2, 12, *space),
                weight=n(24, 2, *window),
                bias=None,
                **given,
            )
    pooled, at = torch.ops.aten.max_pool2d_with_indices(n(6, 6, 4, 4), [2, 2])
    yield sample("aten.max_unpool2d.default", self=pooled, indices=at, output_size=[4, 4])
    pooled, at = torch.ops.aten.max_pool3d_with_indices(n(6, 6, 4, 4, 4), [2, 2, 2])
    yield sample(
        "aten.max_unpool3d.default",
        self=pooled,
        indices=at,
        output_size=[4] * 3,
        stride=[2] * 3,
        padding=[0] * 3,
    )
    for d in (2, 3):
        given = {"kernel_size": [2] * d, "output_size": [3] * d, "random_samples": f(6, 6, d)}
        yield sample(f"aten.fractional_max_pool{d}d.default", self=n(6, 6, *(6,) * d), **given)
    grid = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
    for name in ("grid_sampler", "grid_sampler_2d"):
        yield sample(f"aten.{name}.default", input=n(6, 6, 4, 4), grid=n(6, 6, 12, 2), **grid)
    yield sample(
        "aten.grid_sampler_3d.default", input=n(6, 6, 4, 4, 4), grid=n(6, 6, 2, 2, 3), **grid
    )
    yield sample(
        "aten.affine_grid_generator.default",
        theta=n(6, 2, 3),
        size=[6, 6, 4, 4],
        align_corners=False,
    )


def fused() -> Iterator[Sample]:
    """Operators into which normalisations and attention decompose, and fused layers."""
    yield sample(
        "aten.native_layer_norm.default",
        input=n(6, 6, 6),
        normalized_shape=[6],
        weight=n(6),
        bias=n(6),
        eps=1e-5,
    )
    yield sample(
        "aten.native_layer_norm.default",
        "bare",
        input=n(6, 6, 6),
        normalized_shape=[6, 6],
        weight=None,
        bias=None,
        eps=1e-5,
    )
    yield sample(
        "aten._fused_rms_norm.default",
        input=n(6, 6, 6),
        normalized_shape=[6],
        weight=n(6),
        eps=1e-5,
    )
    for groups in (6, 1):
        given = {"N": 6, "C": 12, "HxW": 4, "group": groups, "eps": 1e-5}
        yield sample(
            "aten.native_group_norm.default",
            f"{groups}",
            input=n(6, 12, 2, 2),
            weight=n(12),
            bias=n(12),
            **given,
        )
    running = {"running_mean": n(6), "running_var": f(6)}
    kind = "aten._native_batch_norm_legit_no_training.default"
    yield sample(kind, input=n(6, 6, 4), weight=n(6), bias=n(6), momentum=0.1, eps=1e-5, **running)
    yield sample(
        kind, "bare", input=n(6, 6), weight=None, bias=None, momentum=0.1, eps=1e-5, **running
    )
    kind = "aten._native_batch_norm_legit.no_stats"
    yield sample(
        kind, input=n(6, 6, 4), weight=n(6), bias=n(6), training=True, momentum=0.1, eps=1e-5
    )
    kind = "aten._native_batch_norm_legit_functional.default"
    for training in (True, False):
        yield sample(
            kind,
            f"{training}",
            input=n(6, 6, 4),
            weight=n(6),
            bias=n(6),
            training=training,
            momentum=0.1,
            eps=1e-5,
            **running,
        )
    given = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
    yield sample(
        "aten.instance_norm.default",
        input=n(6, 6, 4),
        weight=n(6),
        bias=n(6),
        running_mean=None,
        running_var=None,
        **given,
    )
    given["use_input_stats"] = False
    yield sample(
        "aten.instance_norm.default",
        "running",
        input=n(6, 6, 4),
        weight=n(6),
        bias=n(6),
        **running,
        **given,
    )
    for dim, shape in ((0, (6, 1, 1)), (2, (1, 1, 6))):
        for name in ("_weight_norm", "_weight_norm_interface"):
            yield sample(f"aten.{name}.default", f"{dim}", v=n(6, 6, 6), g=f(*shape), dim=dim)
        yield sample("aten.norm_except_dim.default", f"{dim}", v=n(6, 6, 6), pow=2, dim=dim)
    yield sample("aten.norm_except_dim.default", "all", v=n(6, 6), pow=2, dim=-1)
    yield sample("aten._masked_softmax.default", self=n(6, 6, 6), mask=bools(6, 6, 6), dim=1)
    for name in ("softmax", "log_softmax"):
        yield sample(f"aten.special_{name}.default", self=n(6, 6), dim=0)
    q = n(6, 6, 12, 2)
    k = n(6, 6, 6, 2)
    v = n(6, 6, 6, 2)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
    ):
        kind = f"aten.{name}.default"
        yield sample(kind, query=q, key=k, value=v)
        yield sample(kind, "causal", query=q, key=k, value=v, is_causal=True)
        yield sample(kind, "masked", query=q, key=k, value=v, attn_mask=n(6, 1, 12, 6))
        yield sample(kind, "mask of two dims", query=q, key=k, value=v, attn_mask=n(12, 6))
    yield sample(
        kind,
        "grouped",
        query=n(2, 12, 6, 2),
        key=n(2, 6, 6, 2),
        value=n(2, 6, 6, 6),
        enable_gqa=True,
    )
    yield sample(kind, "dropout", query=q, key=k, value=v, dropout_p=0.4)
    for left, right in (
        ((12, 48), (3, 48, 48)),
        ((3, 48, 48), (48, 12)),
        ((48, 12), (12, 48)),
    ):  # shards of 16 bytes a row
        offsets = torch.tensor([2, 6, 12], dtype=torch.int32)
        yield single(
            sample(
                "aten._grouped_mm.default",
                f"{left} {right}",
                self=n(*left).float(),
                mat2=n(*right).float(),
                offs=offsets,
            )
        )
    yield single(
        sample(
            "aten._grouped_mm.default",
            "batch",
            self=n(6, 24, 48).float(),
            mat2=n(6, 48, 48).float(),
        )
    )
    weights = {
        "qkv_weight": n(36, 12),
        "qkv_bias": n(36),
        "proj_weight": n(12, 12),
        "proj_bias": n(12),
    }
    x = n(6, 6, 12)
    kind = "aten._native_multi_head_attention.default"
    yield sample(kind, query=x, key=x, value=x, embed_dim=12, num_head=2, **weights)
    padding = torch.zeros(6, 6, dtype=torch.bool)
    padding[:, 5] = True
    yield sample(
        kind,
        "padded",
        query=x,
        key=x,
        value=x,
        embed_dim=12,
        num_head=2,
        **weights,
        mask=padding,
        mask_type=1,
    )
    layer = {
        "norm_weight_1": n(12),
        "norm_bias_1": n(12),
        "norm_weight_2": n(12),
        "norm_bias_2": n(12),
        "ffn_weight_1": n(6, 12),
        "ffn_bias_1": n(6),
        "ffn_weight_2": n(12, 6),
        "ffn_bias_2": n(12),
    }
    how = {"embed_dim": 12, "num_heads": 2, "use_gelu": True, "norm_first": False, "eps": 1e-5}
    yield sample("aten._transformer_encoder_layer_fwd.default", src=x, **how, **weights, **layer)


def layers() -> Iterator[Sample]:
    """Recurrent layers and cells."""
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        for first in (False, True):
            for stacked, both, drop in ((1, False, 0.0), (2, True, 0.0), (2, False, 0.5)):
                ways = 2 if both else 1
                params = []
                for layer in range(stacked):
                    for _ in range(ways):
                        width = 2 if layer == 0 else 3 * ways
                        params += [n(gates * 3, width), n(gates * 3, 3), n(gates * 3), n(gates * 3)]
                state = n(stacked * ways, 6, 3)
                hx = [state, n(stacked * ways, 6, 3)] if name == "lstm" else state
                how = {
                    "has_biases": True,
                    "num_layers": stacked,
                    "dropout": drop,
                    "train": drop > 0,
                    "bidirectional": both,
                }
                how["batch_first"] = first
                rows = (6, 4) if first else (4, 6)
                yield sample(
                    f"aten.{name}.input",
                    f"{first} {stacked} {both} {drop}",
                    input=n(*rows, 2),
                    hx=hx,
                    params=params,
                    **how,
                )
        weights = {
            "w_ih": n(gates * 3, 2),
            "w_hh": n(gates * 3, 3),
            "b_ih": n(gates * 3),
            "b_hh": n(gates * 3),
        }
        hx = [n(6, 3), n(6, 3)] if name == "lstm" else n(6, 3)
        yield sample(f"aten.{name}_cell.default", input=n(6, 2), hx=hx, **weights)
        params = [n(gates * 3, 2), n(gates * 3, 3), n(gates * 3), n(gates * 3)]
        state = n(1, 6, 3)
        hx = [state, n(1, 6, 3)] if name == "lstm" else state
        packed = {"data": n(9, 2), "batch_sizes": torch.tensor([6, 3]), "hx": hx, "params": params}
        how = {
            "has_biases": True,
            "num_layers": 1,
            "dropout": 0.0,
            "train": False,
            "bidirectional": False,
        }
        yield sample(f"aten.{name}.data", **packed, **how)


def steps() -> Iterator[Sample]:
    """Rounding to the steps of a quantised number."""
    ends = {"quant_min": -8, "quant_max": 7}
    yield sample(
        "aten.fake_quantize_per_tensor_affine.default",
        self=n(6, 12),
        scale=0.1,
        zero_point=1,
        **ends,
    )
    yield sample(
        "aten.fake_quantize_per_tensor_affine_cachemask.default",
        self=n(6, 12),
        scale=0.1,
        zero_point=1,
        **ends,
    )
    tensors = {"scale": f(1).float(), "zero_point": ints(1).int(), **ends}
    yield sample("aten.fake_quantize_per_tensor_affine.tensor_qparams", self=n(6, 12), **tensors)
    tensors["fake_quant_enabled"] = torch.ones(1, dtype=torch.int64)
    yield sample(
        "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
        self=n(6, 12),
        **tensors,
    )
    scales = {"scale": f(1).float(), "zero_point": ints(1).float(), **ends}
    yield single(
        sample(
            "aten._fake_quantize_learnable_per_tensor_affine.default",
            self=n(6, 12).float(),
            **scales,
        )
    )
    yield sample(
        "aten._weight_int8pack_mm.default",
        self=n(6, 12).float(),
        mat2=ints(6, 12).to(torch.int8),
        scales=f(6).float(),
    )
    for name in ("quantize", "dequantize"):
        value = n(6, 12).float() if name == "quantize" else ints(6, 12).to(torch.int8)
        given = {"input": value, "quant_min": -8, "quant_max": 7, "dtype": "int8"}
        kind = f"quantized_decomposed.{name}_per_tensor"
        yield sample(f"{kind}.default", **given, scale=0.1, zero_point=1)
        yield sample(f"{kind}.tensor", **given, scale=f().double(), zero_point=ints())
        given = {"axis": 0, **given}
        yield sample(
            f"quantized_decomposed.{name}_per_channel.default",
            **given,
            scales=f(6),
            zero_points=ints(6),
        )
    for axis in (0, 1):
        scales = {"scale": f(6).float(), "zero_point": ints(6).float(), "axis": axis, **ends}
        yield single(
            sample(
                "aten._fake_quantize_learnable_per_channel_affine.default",
                f"{axis}",
                self=n(6, 6).float(),
                **scales,
            )
        )
        given = {"scale": f(6).float(), "zero_point": ints(6).int(), "axis": axis, **ends}
        for name in (
            "fake_quantize_per_channel_affine",
            "fake_quantize_per_channel_affine_cachemask",
        ):
            yield sample(f"aten.{name}.default", f"{axis}", self=n(6, 6), **given)


def rare_losses() -> Iterator[Sample]:
    """Losses of rows and vectors in their three reductions (0: none, 1: mean, 2: sum)."""
    for reduction in (0, 1, 2):
        note = f"reduction {reduction}"
        sign = ints(6, 12, high=2).double() * 2 - 1
        yield sample(
            "aten.soft_margin_loss.default", note, self=n(6, 12), target=sign, reduction=reduction
        )
        yield sample(
            "aten.hinge_embedding_loss.default",
            note,
            self=n(6, 12),
            target=sign,
            reduction=reduction,
        )
        given = {"log_input": True, "full": True, "eps": 1e-8, "reduction": reduction}
        yield sample(
            "aten.poisson_nll_loss.default", note, input=n(6, 12), target=f(6, 12), **given
        )
        given = {"input1": n(6, 12), "input2": n(12), "target": sign, "margin": 0.1}
        yield sample("aten.margin_ranking_loss.default", note, **given, reduction=reduction)
        rows = ints(6, high=2).double() * 2 - 1
        yield sample(
            "aten.cosine_embedding_loss.default",
            note,
            input1=n(6, 12),
            input2=n(6, 12),
            target=rows,
            reduction=reduction,
        )
        given = {"anchor": n(6, 12), "positive": n(6, 12), "negative": n(6, 12)}
        yield sample("aten.triplet_margin_loss.default", note, **given, reduction=reduction)
        yield sample(
            "aten.multi_margin_loss.default",
            note,
            self=n(6, 6),
            target=ints(6),
            weight=f(6),
            reduction=reduction,
        )
        several = torch.cat([ints(6, 2), torch.full((6, 4), -1)], 1)
        for name in ("multilabel_margin_loss", "multilabel_margin_loss_forward"):
            yield sample(
                f"aten.{name}.default", note, self=n(6, 6), target=several, reduction=reduction
            )
        yield sample(
            "aten.multilabel_margin_loss.default",
            f"one row, {note}",
            self=n(6),
            target=several[0],
            reduction=reduction,
        )
        scores = torch.log_softmax(n(8, 6, 4), -1)
        given = {"log_probs": scores, "targets": ints(6, 3, high=3) + 1, "reduction": reduction}
        sizes = {
            "input_lengths": torch.full((6,), 8),
            "target_lengths": torch.tensor([1, 2, 3, 3, 2, 1]),
        }
        yield sample("aten.ctc_loss.Tensor", note, **given, **sizes)
        yield sample(
            "aten.ctc_loss.IntList",
            note,
            **given,
            input_lengths=[8] * 6,
            target_lengths=[1, 2, 3, 3, 2, 1],
        )
        given = {"weight": f(6), "reduction": reduction, "ignore_index": 2}
        yield sample("aten.nll_loss_forward.default", note, self=n(6, 6), target=ints(6), **given)
        yield sample(
            "aten.nll_loss2d_forward.default",
            note,
            self=n(6, 6, 2, 3),
            target=ints(6, 2, 3),
            **given,
        )


def scans() -> Iterator[Sample]:
    """Delta rules with a decay for each head and for each channel, and Mamba-2's scan."""
    for groups, note in ((6, "own keys"), (3, "shared keys")):
        for channels in ((), (4,)):
            yield sample(
                "autopar.gated_delta_rule.default",
                f"{note}, {len(channels)}",
                query=n(6, 5, groups, 4),
                key=n(6, 5, groups, 4),
                value=n(6, 5, 6, 6),
                decay=-f(6, 5, 6, *channels),
                beta=f(6, 5, 6),
                chunk_size=2,
                normalize=not channels,
            )
        for given in ({"skip": n(6), "bias": n(6)}, {"skip": None, "bias": None}):
            yield sample(
                "autopar.state_space_scan.default",
                f"{note}, {given['bias'] is not None}",
                x=n(6, 5, 6, 6),
                step=f(6, 5, 6),
                decay=-f(6),
                key=n(6, 5, groups, 4),
                query=n(6, 5, groups, 4),
                **given,
                chunk_size=2,
                softplus=given["bias"] is not None,
                low=0.0,
                high=float("inf"),
            )


def sparse_attention() -> Iterator[Sample]:
    """Scores of keys, added up over heads."""
    yield sample(
        "autopar.index_scores.default",
        query=n(6, 6, 6, 4),
        key=n(6, 12, 4),
        weights=n(6, 6, 6),
        scale=0.5,
    )


def losses_with_products() -> Iterator[Sample]:
    """Losses of rows by a matrix of classes, some of them not counted, and of capped scores."""
    for cap in (0.0, 2.0):
        for rows in ((6, 4), (24,)):
            yield sample(
                "autopar.linear_cross_entropy.default",
                f"{rows}, {cap}",
                input=n(6, 4, 4),
                linear_weight=n(12, 4),
                target=ints(*rows),
                ignore_index=2,
                cap=cap,
            )


def rotations() -> Iterator[Sample]:
    """Rotary positions, by angles of each place and of each sample's places."""
    for cos, sin in ((n(6, 4), n(6, 4)), (n(6, 1, 6, 4), n(1, 1, 6, 4))):
        yield sample("autopar.rotate.default", x=n(6, 4, 6, 4), cos=cos, sin=sin)
    yield sample(
        "autopar.rotate.default", "pairs", x=n(6, 4, 6, 4), cos=n(6, 2), sin=n(6, 2), pairs=True
    )


def bodies() -> Iterator[Sample]:
    """Gates, of a value of its own shape and of one that is the same for all rows."""
    for other in (n(6, 4, 6), n(6), n(1, 4, 1)):
        gate = ("aten.silu.default", (("self", n(6, 4, 6)),))
        yield sample(
            "autopar.pointwise", body=("aten.mul.Tensor", (("self", gate), ("other", other)))
        )
    total = ("aten.add.Tensor", (("self", n(6, 4)), ("other", n(6, 4))))
    scaled = ("aten.mul.Tensor", (("self", total), ("other", n(6, 4))))
    yield sample(
        "autopar.pointwise", "linear", body=("aten.div.Tensor", (("self", scaled), ("other", n(4))))
    )


_ALL = (
    images,
    fused,
    layers,
    steps,
    rare_losses,
    scans,
    sparse_attention,
    losses_with_products,
    rotations,
    bodies,
)
FAMILIES = {family.__name__: family for family in _ALL}
