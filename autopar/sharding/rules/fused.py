"""Rules of operators that torch's decompositions produce: norms with statistics, attention weights,
fused layers.
"""

from __future__ import annotations

from .experts import GROUPED
from .registry import Call, register
from .selection import all_whole
from .shape import letters
from .spelling import by_name, tensor_named, whole


def _batch_norm(call: Call) -> str:
    """Batch norm. With running statistics it is pointwise and returns none; batch statistics are
    over all ranks.
    """
    training = call.get("training", default="no_training" not in call.operator.kind)
    over = ["n", *(f"x{i}" for i in range(len(call.inputs[0].shape) - 2))]
    dims = " ".join([over[0], "c", *over[1:]])
    # The statistics that come out have a number a channel, or are empty where none were taken.
    outs = [
        dims,
        *(
            "c" if t.shape[:1] == call.inputs[0].shape[1:2] else whole(t.shape, f"s{i}_")
            for i, t in enumerate(call.outputs[1:])
        ),
    ]
    sides = f"{dims}{', c' * (len(call.inputs) - 1)} -> {', '.join(outs)}"
    return f"{sides} | {', '.join(over)}: statistics" if training else sides


def _group_norm(call: Call) -> str:
    """Each group of channels of each image has a mean and a deviation of its own."""
    # The space stays whole, unlike in `aten.group_norm`: the statistics are outputs here.
    space = whole(call.inputs[0].shape[2:], "x")
    groups = call.integer("group")
    channel, group = (f"(g={groups} !c)", "g") if groups > 1 else ("!c", "1")
    image = f"n {channel} {space}"
    return by_name(
        call,
        {"input": image, "weight": channel, "bias": channel},
        [image, f"n {group}", f"n {group}"],
    )


def _instance_norm(call: Call) -> str:
    """Each channel of each image is normalised by itself.

    Running statistics are taken over the batch, which then stays whole.
    """
    tracked = bool(call.get("use_input_stats")) and call.position("running_mean") is not None
    dims = f"{'!n' if tracked else 'n'} c {whole(call.inputs[0].shape[2:], 'x')}"
    return dims + ", c" * (len(call.inputs) - 1) + f" -> {dims}"


def _weight_norm(call: Call) -> str:
    """Every index of one dim has a direction, which stays whole, and a length."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim")
    # A negative dim stands for one length of the whole tensor.
    if dim < 0:
        return all_whole(call)
    names = [f"d{i}" if i == dim else f"!d{i}" for i in range(rank)]
    length = " ".join("d" + str(i) if i == dim else "1" for i in range(rank))
    vectors = [length for _ in call.inputs[1:]]
    norm = call.operator.kind.startswith("aten.norm_except")
    outs = [length] if norm else [" ".join(names), *(length for _ in call.outputs[1:])]
    return f"{', '.join([' '.join(names), *vectors])} -> {', '.join(outs)}"


def _renorm(call: Call) -> str:
    """Every index of one dim is scaled on its own."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim") % rank
    names = " ".join(f"d{i}" if i == dim else f"!d{i}" for i in range(rank))
    return f"{names} -> {names}"


def _attention(call: Call) -> str:
    """Attention that also gives its weights or their normalisers.

    Weights need whole keys; with normalisers, keys are split together with the queries. Queries are
    not split on their own where their positions count.
    """
    query = call.inputs[0].shape
    if call.get("dropout_p") or call.position("dropout_mask") is not None:
        return all_whole(call)
    lead = letters(len(query) - 3)
    head = "(g r)" if query[-3] != call.inputs[1].shape[-3] else "g"
    row = "!q" if call.get("is_causal") else "q"
    # Normalisers have no dim of the keys; the ring computes them on the way.
    ring = len(call.outputs[1].shape) < len(query) and query[-3] % call.inputs[1].shape[-3] == 0
    keys = "k" if ring else "!k"
    scores = [*lead, head, row, "!xm" if ring else "!k"]
    mask = tensor_named(call, "attn_mask") or ()
    key, value = (" ".join([*lead, "g", keys, width]) for width in ("!w", "!e"))
    dims = {"query": " ".join([*lead, head, row, "!w"]), "key": key, "value": value}
    dims["attn_mask"] = " ".join(scores[len(query) - len(mask) :])
    weights = scores if len(call.outputs[1].shape) == len(query) else scores[:-1]
    rule = by_name(call, dims, [" ".join([*lead, head, row, "!e"]), " ".join(weights)])
    return f"{rule} | k + q: ring" if ring else rule


def _layer(call: Call) -> str:
    """A whole layer of attention, of which only the batch is split."""
    # One kernel holds all products, so no partial sum between them can be reduced.
    dims = {name: f"b !{name[0]} !e" for name in ("src", "query", "key", "value")}
    mask = call.position("mask")
    if mask is not None and call.get("mask_type") in (1, 2):
        dims["mask"] = "b " + whole(call.inputs[mask].shape[1:], "m")
    rows = call.outputs[0].shape
    return by_name(
        call,
        dims,
        [f"b {whole(rows[1:], 'o')}", *(f"b {whole(t.shape[1:], 'p')}" for t in call.outputs[1:])],
    )


def _grouped_product(call: Call) -> str:
    """Products of groups with a matrix each; sums over groups stay whole, since no shard holds
    whole groups.
    """
    left = len(call.inputs[0].shape)
    right = len(call.inputs[1].shape)
    text = {
        (2, 3): GROUPED,
        (3, 3): "e m k, e k n -> e m n | k: sum",
        (3, 2): "!e m k, k !t, !e -> m !t | k: sum",
        (2, 2): "m !t, !t n, !e -> !e m n",
    }[left, right]
    return (
        text if call.position("bias") is None and call.get("out_dtype") is None else all_whole(call)
    )


def _embedding_bag(call: Call) -> str:
    """Bags of rows: the width of a row is split, unless weights of the rows need whole products
    with them.
    """
    # The gradient of a row's weight is a product over all of the row's width.
    wide = "!h" if call.position("per_sample_weights") is not None else "h"
    outs = [f"!b {wide}"]
    for i, tensor in enumerate(call.outputs[1:]):
        columns = len(tensor.shape) == 2 and tensor.shape[1] == call.inputs[0].shape[1]
        outs.append(f"!b {wide}" if columns else whole(tensor.shape, f"o{i}_"))
    return by_name(call, {"weight": f"!v {wide}"}, outs)


def _masked_softmax(call: Call) -> str:
    """A softmax over the elements that a mask of the same shape lets through."""
    rank = len(call.inputs[0].shape)
    dim = call.get("dim")
    # A mask of another shape is one for keys or for queries, laid out as torch's kernel expects.
    if call.inputs[1].shape != call.inputs[0].shape or rank == 0:
        return all_whole(call)
    over = (dim if isinstance(dim, int) else -1) % rank
    dims = " ".join(f"!{name}" if i == over else name for i, name in enumerate(letters(rank)))
    return f"{dims}, {dims} -> {dims}"


register(
    """aten._native_batch_norm_legit_no_training.default aten._native_batch_norm_legit.no_stats
    aten._native_batch_norm_legit_functional.default""",
    _batch_norm,
)
register("aten.native_group_norm.default", _group_norm)
register("aten.instance_norm.default", _instance_norm)
register(
    "aten._weight_norm.default aten._weight_norm_interface.default aten.norm_except_dim.default",
    _weight_norm,
)
register("aten.renorm.default", _renorm)
_ATTENTIONS = (
    "aten._scaled_dot_product_flash_attention_for_cpu.default "
    "aten._scaled_dot_product_attention_math.default"
)
register(_ATTENTIONS, _attention, products=("ex", "wx"))
register(
    "aten._native_multi_head_attention.default aten._transformer_encoder_layer_fwd.default",
    _layer,
    differentiable=False,
)
register("aten._grouped_mm.default", _grouped_product, linear=((0,), (1,)), products=("/e",))
register(
    "aten.embedding_bag.default aten.embedding_bag.padding_idx aten._embedding_bag.default",
    _embedding_bag,
)
register("aten._embedding_bag_forward_only.default", _embedding_bag, differentiable=False)
register("aten._masked_softmax.default", _masked_softmax, saves="output")
