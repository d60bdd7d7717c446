"""Rules of recurrent layers: sequences are independent, so the batch can be split; time and state
stay whole.
"""

from __future__ import annotations

from autopar.ir import Ref

from .registry import Call, register
from .selection import all_whole
from .spelling import by_name, whole

DELTA_RULE = "autopar.gated_delta_rule.default"
STATE_SPACE = "autopar.state_space_scan.default"
TRITON_SCAN = "triton"
"""The attribute `kernel` of a scan in kernels of a framework (state-spaces/mamba)."""


def _delta_rule(call: Call) -> str:
    """Heads are independent, in groups that share keys, and so are the columns e of their states.

    A step reads its state through the whole width of a key. A shard of the sequence goes on from
    the state that the shards before it leave.
    """
    heads = _heads(call.inputs[1].shape[2], call.inputs[2].shape[2])
    decay = f"b t {heads}" + " !w" * (len(call.inputs[3].shape) == 4)
    return f"b t g !w, b t g !w, b t {heads} e, {decay}, b t {heads} -> b t {heads} e | t: prefix"


def _state_space(call: Call) -> str:
    """As the delta rule; each head has one decay, skip and bias for all of its steps."""
    heads = _heads(call.inputs[3].shape[2], call.inputs[0].shape[2])
    dims = {
        "x": f"b t {heads} e",
        "step": f"b t {heads}",
        "decay": heads,
        "key": "b t g !w",
        "query": "b t g !w",
        "skip": heads,
        "bias": heads,
    }
    return f"{by_name(call, dims, [f'b t {heads} e'])} | t: prefix"


def _heads(groups: int, heads: int) -> str:
    return f"(g={groups} !r={heads // groups})"


# The price counts the products of chunks (`costmodel/device/scans.py`); here all factors say that
# there are any.
register(DELTA_RULE, _delta_rule, linear=((2,),), products=("",))
register(STATE_SPACE, _state_space, linear=((0,),), products=("",))


def _layers(call: Call) -> str:
    """torch's stacked layers: `input`, then states `[layers, batch, width]`, then weights.

    Dropout between layers needs the whole batch. A layer's multiply-adds count the width of its
    state on both sides.
    """
    given = call.get("params")
    weights = (
        {value.index for value in given if isinstance(value, Ref)}
        if isinstance(given, tuple)
        else set()
    )
    sequence = call.inputs[0].shape
    drops = (
        bool(call.get("train"))
        and bool(call.get("dropout"))
        and call.integer("num_layers", default=1) > 1
    )
    # torch draws this noise inside of the fused layers, where a rank cannot ask for that of its own
    # samples.
    batch = "!b" if drops else "b"
    if len(sequence) == 2:
        rows = "!s"
    else:
        rows = f"{batch} !s" if call.get("batch_first") else f"!s {batch}"
    states = f"!l {batch} !h" if len(sequence) == 3 else "!l !h"
    dims = [f"{rows} !i"]
    for position, tensor in enumerate(call.inputs[1:], 1):
        gates = "!g" if position == min(weights, default=0) else f"!h{position}_0"
        dims.append(
            f"{gates} {whole(tensor.shape[1:], f'h{position}_k')}"
            if position in weights
            else states
        )
    outs = [
        f"{rows} !ho",
        *(
            f"!l {batch} !h{i}" if len(sequence) == 3 else f"!l !h{i}"
            for i in range(1, len(call.outputs))
        ),
    ]
    return f"{', '.join(dims)} -> {', '.join(outs)}"


def _cell(call: Call) -> str:
    """One step of a layer: `input`, the states, the two weights and their biases; every unit needs
    all of the input.
    """
    given = call.get("hx")
    states = {
        value.index
        for value in (given if isinstance(given, tuple) else (given,))
        if isinstance(value, Ref)
    }
    batch = "b " if len(call.inputs[0].shape) == 2 else ""
    dims = dict.fromkeys(states, f"{batch}!h") | {0: f"{batch}!i"}
    names = {"w_ih": "!g !i", "w_hh": "!g !h", "b_ih": "!g", "b_hh": "!g"}
    dims |= {
        position: text
        for name, text in names.items()
        if (position := call.position(name)) is not None
    }
    return (
        f"{', '.join(dims[i] for i in range(len(call.inputs)))} -> "
        f"{', '.join(f'{batch}!h' for _ in call.outputs)}"
    )


register(
    "aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input",
    _layers,
    products=("h", "h"),
)
register(
    "aten.lstm_cell.default aten.gru_cell.default aten.rnn_tanh_cell.default "
    "aten.rnn_relu_cell.default",
    _cell,
    products=("h", "i"),
)
# Packed sequences: rows of all sequences that still run, step by step.
register("aten.lstm.data aten.gru.data aten.rnn_tanh.data aten.rnn_relu.data", all_whole)
