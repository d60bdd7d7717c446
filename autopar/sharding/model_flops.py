"""The FLOPs that a model asks of a step, whatever plan runs it: those of its products.

    FLOPs of a product = 2 * multiply-adds of the whole batch * passes
    passes             = 1 forward + 1 backward for each operand with a gradient

Products are those with weights, convolutions, and both of attention. Of attention's scores count
those that its causal mask or its window leaves: of s x s behind a causal mask half. What a plan
recomputes is not counted, nor are norms, activations and the optimizer. It is the count of "model
FLOPs utilization" (Chowdhery et al., arXiv:2204.02311, appendix B). For a decoder, 6 * (parameters
that a token meets, without the embedding) * tokens, and attention beside.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.ir import Operator
from autopar.ir.recipes import recipe_of
from autopar.ir.stored_products import LINEAR_LOSS

from .analysis import Analysis, Offer
from .notation import Rule
from .rules import Call, products_of
from .rules.experts import EXPERTS, network_of
from .rules.experts import multiply_adds as of_experts


def multiply_adds(operator: Operator, offer: Offer) -> float:
    """The multiply-adds of an operator's products, 0 of one without any."""
    if operator.kind == EXPERTS:
        return float(of_experts(offer.call))
    return products_of(operator.kind, offer.rule)


def model_flops(analysis: Analysis) -> dict[str, float]:
    """FLOPs of a step by the floating-point type of the products."""
    flops: defaultdict[str, float] = defaultdict(float)
    for operator in analysis.warm:
        offer = analysis.offers[operator.name]
        if work := multiply_adds(operator, offer):
            own = _type(operator, analysis)
            passes = _passes(operator, analysis)
            ahead = 2 * work * computed_share(offer.call, offer.rule)
            recipe = recipe_of(operator)
            narrow = 0 if recipe is None else narrow_passes(operator, passes)
            if recipe is not None:
                flops[recipe.kernel] += narrow * ahead
            if passes > narrow:
                flops[own] += (passes - narrow) * ahead
    return dict(flops)


def _type(operator: Operator, analysis: Analysis) -> str:
    """The type of an operator's products; experts may weigh their results in a wider one.

    So are the sums of a loss.
    """
    if operator.kind == EXPERTS:
        return network_of(analysis.offers[operator.name].call)[0].results[0].dtype
    name = operator.inputs[0] if operator.kind == LINEAR_LOSS else operator.outputs[0]
    return analysis.graph.tensors[name].dtype


def narrow_passes(operator: Operator, passes: int) -> int:
    """The products that read narrow operands; experts make gradients of weights in a wide type."""
    return min(passes, 2) if operator.kind == EXPERTS else passes


def _passes(operator: Operator, analysis: Analysis) -> int:
    """The forward pass, and a product for the gradient of each of two operands."""
    if operator.outputs[0] not in analysis.gradients:
        return 1
    tensors = analysis.graph.tensors
    # A bias, of one dim, is added and not multiplied. Attention has two products of two operands.
    operands = [
        name
        for name in operator.inputs
        if name in analysis.gradients and len(tensors[name].shape) > 1
    ]
    return 1 + min(len(operands), 2)


def computed_share(call: Call, rule: Rule) -> float:
    """The share of attention's scores that a causal mask or a window of keys leaves."""
    window = call.get("window", default=0)
    sizes = {factor.name: factor.size for factor in rule.factors}
    keys = sizes.get("k", 0)
    within = min(window / keys, 1.0) if isinstance(window, int) and window and keys else 1.0
    causal = call.get("is_causal") is True
    return within - within**2 / 2 if causal else within
