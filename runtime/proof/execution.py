"""Executes one operator shard by shard, in one process, and compares values and gradients with the whole.

Every option of the operator's rule is tried on every mesh: inputs are cut by the option's placements, each rank runs
its local form, and the ranks' results are put together by the meaning of the four kinds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from autopar.ir import Ref
from autopar.order.actions import Action, Word
from autopar.sharding.candidates import Strategies, options_of, strategies_of
from autopar.sharding.equal_parts import split_variants
from autopar.sharding.layout import Kind, Layout, format_layout
from autopar.sharding.program import Compute, Decision, operator_collectives
from autopar.sharding.rules import RULES, Call, rule_of

from ..collective_log import Issued, unequal
from ..current_action import at
from ..functions import arguments_of, function_of
from ..local_call import LocalCall, LocalOperator
from ..localise import localise
from .ranks import AxisLog, axis_groups, in_threads
from .sample import CPU, Sample

SEED = 7
_FORWARD, _BACKWARD = Action(word=Word.FORWARD), Action(word=Word.BACKWARD)

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def carries_gradient(dtype: torch.dtype) -> bool:
    """Whether a tensor of this type has a gradient here: eight bits are too few for one."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


CONSTANTS = {
    "cross_entropy": ("weight",), "nll_loss": ("weight",), "multi_margin_loss": ("weight",), "soft_margin_loss": ("target",),
    "fake_quantize_per": ("scale", "zero_point"), "flash_attention_for_cpu": ("attn_mask",), "fractional_max_pool": ("random_samples",),
    "binary_cross_entropy": ("weight", "pos_weight"),
}  # fmt: skip
"""Float arguments in which torch does not differentiate, by a part of the operator's kind."""


class Disproved(AssertionError):
    """A rule says something of an operator that its execution contradicts."""


def strategies(case: Sample, mesh: Sequence[int]) -> Strategies:
    """All strategies of the sample's operator on a mesh."""
    call = Call.of(case.graph, case.operator)
    rule = rule_of(call)
    variants = split_variants(case.graph, {"op": rule})[0]["op"]
    return strategies_of(rule, options_of(call, rule, with_gradient(case), variants), mesh)


def with_gradient(case: Sample) -> frozenset[str]:
    """The tensors of the sample that carry a gradient."""
    floats = {name for name, tensor in case.graph.tensors.items() if carries_gradient(getattr(torch, tensor.dtype))}
    smooth = RULES[case.kind].differentiable and any(name in floats for name in case.operator.outputs)
    names = ("running_mean", "running_var", *(name for part, own in CONSTANTS.items() if part in case.kind for name in own))
    constants = (case.operator.attributes.get(name) for name in names)
    floats -= {case.operator.inputs[ref.index] for ref in constants if isinstance(ref, Ref)}
    return frozenset(floats) if smooth and any(name in floats for name in case.operator.inputs) else frozenset()


def decisions(case: Sample, mesh: Sequence[int]) -> Iterator[Decision]:
    """Every strategy as a decision."""
    found = strategies(case, mesh)
    for index in range(len(found.choices)):
        inputs, outputs = found.layouts(index)
        chosen = tuple(found.options[o] for o in found.choices[index])
        yield Decision(options=chosen, rule=found.rule, inputs=inputs, outputs=outputs)


def prove(case: Sample, mesh: tuple[int, ...]) -> int:
    """Check every strategy of a sample on a mesh; how many they were."""
    count = 0
    whole = Execution(case)
    for decision in decisions(case, mesh):
        text = f"{case} on {mesh}: {' '.join(o.name for o in decision.options)}, {' | '.join(map(format_layout, decision.inputs))}"
        try:
            whole.check(decision, mesh)
        except Exception as error:
            raise Disproved(f"{text}: {error}") from error
        count += 1
    return count


def shard(whole: Tensor, layout: Layout, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> Tensor:
    """The shard at a coordinate of the mesh: splits nest by parts, then by axis."""
    bits = torch.int8 if whole.dtype.is_floating_point and whole.dtype.itemsize == 1 else _UNSIGNED.get(whole.dtype)
    if bits is not None:  # torch has few functions of these types
        return shard(whole.view(bits), layout, mesh, coordinate).view(whole.dtype)
    for dim in range(whole.dim()):
        splits = [(p.parts, axis) for axis, p in enumerate(layout) if p.kind is Kind.SPLIT and p.dim == dim and mesh[axis] > 1]
        if not splits:
            continue
        index = torch.arange(whole.shape[dim])
        for parts, group in itertools.groupby(sorted(splits), key=lambda pair: pair[0]):
            degree, position = 1, 0
            for _, axis in group:
                degree *= mesh[axis]
                position = position * mesh[axis] + coordinate[axis]
            span = whole.shape[dim] // parts
            assert span % degree == 0, f"{layout} does not divide {list(whole.shape)}"
            index = index[index % span // (span // degree) == position]
        whole = whole.index_select(dim, index)
    return whole


def hold(whole: Tensor, layout: Layout, mesh: tuple[int, ...], *, gradient: bool, seed: int) -> list[Tensor]:
    """Each rank's part: shards; the addends of a partial sum are random and depend on the partial axes alone."""
    axes = _partial_axes(layout, gradient)
    generator = torch.Generator().manual_seed(seed)
    addends = [torch.rand(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(math.prod(mesh[a] for a in axes) - 1)]
    addends.append(whole - sum(addends) if addends else whole)
    held = []
    for coordinate in itertools.product(*map(range, mesh)):
        position = 0
        for axis in axes:
            position = position * mesh[axis] + coordinate[axis]
        held.append(shard(addends[position], layout, mesh, coordinate))
    return held


def assemble(held: list[Tensor], layout: Layout, mesh: tuple[int, ...], shape: tuple[int, ...], *, gradient: bool) -> Tensor:
    """The whole value that the ranks hold; fails where replicas differ."""
    partial = _partial_axes(layout, gradient)
    replicas = [axis for axis, p in enumerate(layout) if p.kind is not Kind.SPLIT and axis not in partial]
    total = torch.zeros(shape, dtype=held[0].dtype)
    index = torch.arange(total.numel()).reshape(shape)
    first: dict[tuple[int, ...], Tensor] = {}
    for coordinate, value in zip(itertools.product(*map(range, mesh)), held, strict=True):
        key = tuple(c for axis, c in enumerate(coordinate) if axis not in replicas)
        if key in first:
            unequal = f"replicas of [{format_layout(layout)}] differ"
            torch.testing.assert_close(value, first[key], rtol=1e-9, atol=1e-9, equal_nan=True, msg=unequal)
            continue
        first[key] = value
        total.view(-1).index_add_(0, shard(index, layout, mesh, coordinate).reshape(-1), value.reshape(-1))
    return total


def _partial_axes(layout: Layout, gradient: bool) -> list[int]:
    kind = Kind.BROADCAST if gradient else Kind.PARTIAL
    return [axis for axis, placement in enumerate(layout) if placement.kind is kind]


class Execution:
    """The whole operator's outputs and gradients, and the comparison of a split one with them."""

    def __init__(self, case: Sample) -> None:
        self.case = case
        self.gradients = with_gradient(case)
        plain = LocalOperator(function=function_of(case.kind), attributes=case.operator.attributes)
        leaves = self._leaves(case.values)
        self.outputs = self._run(plain, leaves)
        generator = torch.Generator().manual_seed(SEED + 1)
        self.upstream = [torch.randn(o.shape, dtype=o.dtype, generator=generator) if carries_gradient(o.dtype) else o for o in self.outputs]
        self.wanted = self._backward(self.outputs, self.upstream, leaves)

    def _leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [
            v.detach().clone().requires_grad_(name in self.gradients)
            for name, v in zip(self.case.operator.inputs, values, strict=True)
        ]

    def _run(self, local: LocalOperator, inputs: Sequence[Tensor]) -> list[Tensor]:
        torch.default_generator.manual_seed(SEED)
        results = local.function(**arguments_of(local.function, local.attributes, inputs, CPU))
        outputs = list(results)[: len(self.case.operator.outputs)] if isinstance(results, list | tuple) else [results]
        return [value * local.scale if local.scale != 1.0 else value for value in outputs]

    def _backward(self, outputs: Sequence[Tensor], upstream: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of every leaf; zeros where autograd finds no way."""
        roots = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not roots or not wanted:
            return [None] * len(leaves)
        given = torch.autograd.grad([o for o, _ in roots], wanted, [g for _, g in roots], allow_unused=True)
        found = iter([g.to_dense() if g is not None and g.is_sparse else g for g in given])
        grads = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return [torch.zeros_like(v) if v.requires_grad and g is None else g for v, g in zip(leaves, grads, strict=True)]

    def check(self, decision: Decision, mesh: tuple[int, ...]) -> None:
        """Run every rank and compare."""
        operator, tensors = self.case.operator, self.case.graph.tensors
        shards = self._cut(self.case.values, decision.inputs, mesh, gradient=False)
        ahead = self._cut(self.upstream, decision.outputs, mesh, gradient=True)
        coordinates = list(itertools.product(*map(range, mesh)))
        talks = any(option.communication is not None for option in decision.options)
        groups = axis_groups(mesh) if talks else ({},) * len(coordinates)

        def run(rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
            call = LocalCall(
                operator=operator,
                decision=decision,
                inputs=tuple(tensors[n] for n in operator.inputs),
                outputs=tuple(tensors[n] for n in operator.outputs),
                mesh=mesh,
                coordinate=coordinates[rank],
                groups=tuple(group for axes, group in groups[rank].items() if len(axes) == 1),
                joint=groups[rank],
            )
            leaves = self._leaves([held[rank] for held in shards])
            log = AxisLog()
            with log if talks else nullcontext():
                with at(_FORWARD):
                    results = self._run(localise(call), leaves)
                with at(_BACKWARD):
                    grads = self._backward(results, [held[rank] for held in ahead], leaves)
            self._compare_issued(log, decision, mesh)
            for index, value in enumerate(results):
                assert value.shape == call.local_output(index), f"output {index} is {list(value.shape)}, planned {call.local_output(index)}"
            return [value.detach() for value in results], grads

        ranks = range(len(coordinates))
        held_by = in_threads(len(ranks), run) if talks else [run(rank) for rank in ranks]
        outputs, grads = [o for o, _ in held_by], [g for _, g in held_by]
        for index, (whole, layout) in enumerate(zip(self.outputs, decision.outputs, strict=True)):
            self._compare(f"output {index}", [o[index] for o in outputs], whole.detach(), layout, mesh, gradient=False)
        for index, (wanted, layout) in enumerate(zip(self.wanted, decision.inputs, strict=True)):
            held = [g[index] for g in grads]
            if wanted is not None:
                self._compare(f"gradient {index}", [h for h in held if h is not None], wanted, layout, mesh, gradient=True)

    @staticmethod
    def _cut(values: Sequence[Tensor], layouts: Sequence[Layout], mesh: tuple[int, ...], *, gradient: bool) -> list[list[Tensor]]:
        return [hold(v, layout, mesh, gradient=gradient, seed=i) for i, (v, layout) in enumerate(zip(values, layouts, strict=True))]

    def _compare_issued(self, log: AxisLog, decision: Decision, mesh: tuple[int, ...]) -> None:
        """Compare the collectives issued inside the operator with the priced ones."""
        step = Compute(operator=self.case.operator, decision=decision)
        priced = operator_collectives(self.case.graph, step, mesh, self.gradients) if decision.rule is not None else []
        of_phase = {"forward": _FORWARD, "backward": _BACKWARD}
        wanted = [(of_phase[c.phase], Issued(kind=c.kind, ranks=c.axes, nbytes=c.nbytes)) for c in priced]
        wrong = unequal(wanted, log.issued)
        assert not wrong, wrong
        issued, order = ([(action, c.kind, c.ranks) for action, c in found] for found in (log.issued, wanted))
        assert issued == order, f"issued in the order {issued}; priced in the order {order}"

    def _compare(self, what: str, held: list[Tensor], whole: Tensor, layout: Layout, mesh: tuple[int, ...], *, gradient: bool) -> None:
        if not (whole.is_complex() or carries_gradient(whole.dtype)):
            plain = torch.float64 if whole.is_floating_point() else torch.int64
            held, whole = [value.to(plain) for value in held], whole.to(plain)
        found = assemble(held, layout, mesh, tuple(whole.shape), gradient=gradient)
        if gradient and _partial_axes(layout, gradient):  # shares of infinity do not add up
            found = torch.where(torch.isfinite(whole), found, whole)
        close = self.case.tolerance
        # Random addends add up to small elements with the rounding of the large ones.
        scale = float(whole[torch.isfinite(whole)].abs().max()) if whole.isfinite().any() else 0.0
        slack = close * max(scale, 1.0)
        torch.testing.assert_close(found, whole, rtol=close, atol=slack, equal_nan=True, msg=lambda text: f"{what}: {text}")
