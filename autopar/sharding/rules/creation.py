"""Rules of operators that create tensors: equal elements are split like any shard, others are whole
on every device.
"""

from __future__ import annotations

from .registry import Call, register
from .selection import all_whole


def _like(call: Call) -> str:
    """Values do not depend on the input: dims of equal size go together, other dims of the input
    stay whole.
    """
    before = call.inputs[0].shape
    after = call.outputs[0].shape
    # Equal sizes go together although no value is read: the input is then used in the layout in
    # which it lies anyway, and nothing is moved for the sake of its shape.
    shared = [i < len(before) and before[i] == after[i] for i in range(len(after))]
    outs = [f"d{i}" if same else f"e{i}" for i, same in enumerate(shared)]
    ins = [f"d{i}" if i < len(after) and shared[i] else f"!w{i}" for i in range(len(before))]
    rest = "".join(
        f", {' '.join(f'!v{j}_{i}' for i in range(len(t.shape)))}"
        for j, t in enumerate(call.inputs[1:])
    )
    return f"{' '.join(ins)}{rest} -> {' '.join(outs)}"


def _equal_elements(call: Call) -> str:
    """Every element is the same, so that a shard is made by its size alone."""
    return f" -> {' '.join(f'd{i}' for i in range(len(call.outputs[0].shape)))}"


register(
    "aten.zeros.default aten.ones.default aten.full.default", _equal_elements, differentiable=False
)
# Elements depend on their places, of which a shard would have to know the first; most of these are
# small.
register(
    """aten.arange.default aten.arange.start aten.arange.start_step aten.eye.default
    aten.scalar_tensor.default aten.empty.memory_format aten.empty_permuted.default
    aten.empty_strided.default aten.eye.m aten.linspace.default aten.logspace.default
    aten.range.step aten.tril_indices.default aten.triu_indices.default aten.hann_window.default
    aten.hann_window.periodic aten.hamming_window.default aten.blackman_window.default
    aten.bartlett_window.default aten.kaiser_window.default aten.fft_fftfreq.default
    aten.fft_rfftfreq.default aten.vander.default""",
    all_whole,
    differentiable=False,
)
register(
    """aten.new_zeros.default aten.new_ones.default aten.new_full.default aten.new_empty.default
    aten.zeros_like.default aten.ones_like.default aten.full_like.default
    aten.empty_like.default""",
    _like,
    differentiable=False,
)
