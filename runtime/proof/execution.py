"""Executes one operator shard by shard, in one process, and compares it with the whole.

Every option of the operator's rule is tried on every mesh: inputs are cut by the option's
placements, each rank runs its local form, and the ranks' values and gradients are put together by
the meaning of the four kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from autopar.ir import Ref
from autopar.order.actions import Action, Word
from autopar.runtime.execution.collective_log import Issued, unequal
from autopar.runtime.lowering.localise import localise
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import LocalCall, LocalOperator
from autopar.runtime.ranks.current_action import at
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.torch_versions import WITHOUT_DERIVATIVE
from autopar.sharding.candidates import options_of, strategies_of
from autopar.sharding.equal_parts import split_variants
from autopar.sharding.layout import Layout, format_layout
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Collective, Compute, Decision, operator_collectives
from autopar.sharding.rules import RULES, Call, rule_of
from autopar.sharding.strategies import Strategies

from .sample import CPU, Sample
from .shards import assemble, hold, partial_axes
from .thread_ranks import AxisLog, axis_groups, in_threads

SEED = 7
_FORWARD = Action(word=Word.FORWARD)
_BACKWARD = Action(word=Word.BACKWARD)


def carries_gradient(dtype: torch.dtype) -> bool:
    """Whether a tensor of this type has a gradient here: eight bits are too few for one."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


CONSTANTS = {
    "cross_entropy": ("weight",),
    "nll_loss": ("weight",),
    "multi_margin_loss": ("weight",),
    "soft_margin_loss": ("target",),
    "fake_quantize_per": ("scale", "zero_point"),
    "flash_attention_for_cpu": ("attn_mask",),
    "fractional_max_pool": ("random_samples",),
    "binary_cross_entropy": ("weight", "pos_weight"),
}
"""Float arguments in which torch does not differentiate, by a part of the operator's kind."""


class Disproved(AssertionError):
    """A rule says something of an operator that its execution contradicts."""


def strategies(case: Sample, mesh: Sequence[int]) -> Strategies:
    """All strategies of the sample's operator on a mesh."""
    call = Call.of(case.graph, case.operator)
    rule = rule_of(call)
    # Equal parts of a dim, as of fused projections, have options of their own.
    variants = split_variants(case.graph, {"op": rule})[0]["op"]
    return strategies_of(rule, options_of(call, rule, with_gradient(case), variants), mesh)


def with_gradient(case: Sample) -> frozenset[str]:
    """The tensors of the sample that carry a gradient."""
    floats = {
        name
        for name, tensor in case.graph.tensors.items()
        if carries_gradient(getattr(torch, tensor.dtype))
    }
    smooth = (
        RULES[case.kind].differentiable
        and case.kind not in WITHOUT_DERIVATIVE
        and any(name in floats for name in case.operator.outputs)
    )
    # Statistics that an operator updates get no gradient, nor do the arguments listed above.
    names = (
        "running_mean",
        "running_var",
        *(name for part, own in CONSTANTS.items() if part in case.kind for name in own),
    )
    constants = (case.operator.attributes.get(name) for name in names)
    floats -= {case.operator.inputs[ref.index] for ref in constants if isinstance(ref, Ref)}
    if smooth and any(name in floats for name in case.operator.inputs):
        return frozenset(floats)
    return frozenset()


def decisions(case: Sample, mesh: Sequence[int]) -> Iterator[Decision]:
    """Every strategy of the sample's operator on a mesh, as a decision."""
    space = strategies(case, mesh)
    for index, choice in enumerate(space.choices):
        inputs, outputs = space.layouts(index)
        options = tuple(space.options[number] for number in choice)
        yield Decision(options=options, rule=space.rule, inputs=inputs, outputs=outputs)


def prove(case: Sample, mesh: tuple[int, ...]) -> int:
    """Check every strategy of a sample on a mesh, and count them.

    Raises `Disproved`.
    """
    count = 0
    whole = Execution(case)
    for decision in decisions(case, mesh):
        try:
            whole.check(decision, mesh)
        except Exception as error:
            options = " ".join(option.name for option in decision.options)
            layouts = " | ".join(map(format_layout, decision.inputs))
            raise Disproved(f"{case} on {mesh}: {options}, {layouts}: {error}") from error
        count += 1
    return count


class Execution:
    """The whole operator's outputs and gradients, with which a split one is compared."""

    def __init__(self, case: Sample) -> None:
        self.case = case
        self.gradients = with_gradient(case)
        plain = LocalOperator(function=function_of(case.kind), attributes=case.operator.attributes)
        leaves = self._leaves(case.values)
        self.outputs = self._run(plain, leaves)
        generator = torch.Generator().manual_seed(SEED + 1)
        # Random, since a gradient of ones would hide a wrong sum of shares.
        self.upstream = [
            torch.randn(o.shape, dtype=o.dtype, generator=generator)
            if carries_gradient(o.dtype)
            else o
            for o in self.outputs
        ]
        self.wanted = self._backward(self.outputs, self.upstream, leaves)

    def _leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Inputs as leaves of autograd."""
        return [
            v.detach().clone().requires_grad_(name in self.gradients)
            for name, v in zip(self.case.operator.inputs, values, strict=True)
        ]

    def _run(self, local: LocalOperator, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a local operator; random numbers are the same on every rank."""
        torch.default_generator.manual_seed(SEED)
        results = local.function(**arguments_of(local.function, local.attributes, inputs, CPU))
        outputs = [results]
        if isinstance(results, list | tuple):
            # An operator may return more than the graph reads.
            outputs = list(results)[: len(self.case.operator.outputs)]
        if local.scale == 1.0:
            return outputs
        return [value * local.scale for value in outputs]

    def _backward(
        self, outputs: Sequence[Tensor], upstream: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradient of every leaf; zeros where autograd finds no way."""
        roots = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not roots or not wanted:
            return [None] * len(leaves)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            [o for o, _ in roots], wanted, [g for _, g in roots], allow_unused=True
        )
        of_wanted = iter(gradients)
        result: list[Tensor | None] = []
        for leaf in leaves:
            if not leaf.requires_grad:
                result.append(None)
                continue
            gradient = next(of_wanted)
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            result.append(gradient.to_dense() if gradient.is_sparse else gradient)
        return result

    def check(self, decision: Decision, mesh: tuple[int, ...]) -> None:
        """Run every rank and compare."""
        shards = self._cut(self.case.values, decision.inputs, mesh, gradient=False)
        ahead = self._cut(self.upstream, decision.outputs, mesh, gradient=True)
        coordinates = list(itertools.product(*map(range, mesh)))
        talks = any(option.communication is not None for option in decision.options)
        groups: Sequence[Mapping[Axes, AxisGroup]] = ({},) * len(coordinates)
        if talks:
            groups = axis_groups(mesh)

        def run(rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
            """The outputs and gradients of one rank, which must issue what is priced."""
            call = self._call(decision, mesh, coordinates[rank], groups[rank])
            leaves = self._leaves([held[rank] for held in shards])
            log = AxisLog()
            with log if talks else nullcontext():
                with at(_FORWARD):
                    results = self._run(localise(call), leaves)
                with at(_BACKWARD):
                    grads = self._backward(results, [held[rank] for held in ahead], leaves)
            self._compare_issued(log, decision, mesh)
            for index, value in enumerate(results):
                assert value.shape == call.local_output(index), (
                    f"output {index} is {list(value.shape)}, planned {call.local_output(index)}"
                )
            return [value.detach() for value in results], grads

        # Ranks that communicate wait for one another, so they run at once; others need no threads.
        ranks = range(len(coordinates))
        results = in_threads(len(ranks), run) if talks else [run(rank) for rank in ranks]
        for index, (whole, layout) in enumerate(zip(self.outputs, decision.outputs, strict=True)):
            values = [outputs[index] for outputs, _ in results]
            self._compare(f"output {index}", values, whole.detach(), layout, mesh)
        for index, (wanted, layout) in enumerate(zip(self.wanted, decision.inputs, strict=True)):
            if wanted is not None:
                held = [grads[index] for _, grads in results]
                values = [gradient for gradient in held if gradient is not None]
                self._compare(f"gradient {index}", values, wanted, layout, mesh, gradient=True)

    def _call(
        self,
        decision: Decision,
        mesh: tuple[int, ...],
        coordinate: tuple[int, ...],
        groups: Mapping[Axes, AxisGroup],
    ) -> LocalCall:
        """The call of one rank."""
        operator = self.case.operator
        tensors = self.case.graph.tensors
        return LocalCall(
            operator=operator,
            decision=decision,
            inputs=tuple(tensors[name] for name in operator.inputs),
            outputs=tuple(tensors[name] for name in operator.outputs),
            mesh=mesh,
            coordinate=coordinate,
            groups=tuple(group for axes, group in groups.items() if len(axes) == 1),
            joint=groups,
        )

    @staticmethod
    def _cut(
        values: Sequence[Tensor],
        layouts: Sequence[Layout],
        mesh: tuple[int, ...],
        *,
        gradient: bool,
    ) -> list[list[Tensor]]:
        """The parts of every value, by rank."""
        return [
            hold(v, layout, mesh, gradient=gradient, seed=i)
            for i, (v, layout) in enumerate(zip(values, layouts, strict=True))
        ]

    def _compare_issued(self, log: AxisLog, decision: Decision, mesh: tuple[int, ...]) -> None:
        """Compare the collectives issued inside the operator with the priced ones."""
        step = Compute(operator=self.case.operator, decision=decision)
        priced: Sequence[Collective] = []
        if decision.rule is not None:
            priced = operator_collectives(self.case.graph, step, mesh, self.gradients)
        of_phase = {"forward": _FORWARD, "backward": _BACKWARD}
        wanted = [
            (of_phase[c.phase], Issued(kind=c.kind, ranks=c.axes, nbytes=c.nbytes, most=c.most))
            for c in priced
        ]
        wrong = unequal(wanted, log.issued)
        assert not wrong, wrong
        # Lists that agree as sets may still deadlock: ranks of another role wait for this order.
        issued, order = (
            [(action, c.kind, c.ranks) for action, c in calls] for calls in (log.issued, wanted)
        )
        assert issued == order, f"issued in the order {issued}; priced in the order {order}"

    def _compare(
        self,
        what: str,
        held: list[Tensor],
        whole: Tensor,
        layout: Layout,
        mesh: tuple[int, ...],
        *,
        gradient: bool = False,
    ) -> None:
        """Compare the value that the ranks hold with the whole."""
        # Types without arithmetic are compared in one that holds all their values.
        if not (whole.is_complex() or carries_gradient(whole.dtype)):
            plain = torch.float64 if whole.is_floating_point() else torch.int64
            held = [value.to(plain) for value in held]
            whole = whole.to(plain)
        value = assemble(held, layout, mesh, tuple(whole.shape), gradient=gradient)
        # Shares of infinity do not add up.
        if gradient and partial_axes(layout, gradient):
            value = torch.where(torch.isfinite(whole), value, whole)
        close = self.case.tolerance
        # Random addends add up to small elements with the rounding of the large ones.
        scale = float(whole[torch.isfinite(whole)].abs().max()) if whole.isfinite().any() else 0.0
        slack = close * max(scale, 1.0)
        torch.testing.assert_close(
            value, whole, rtol=close, atol=slack, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
