"""From global to local: the function that a rank runs for an operator, and its attributes there."""

from __future__ import annotations

from autopar.runtime.local_forms.narrow_experts import by_recipe
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import LocalCall, LocalOperator
from autopar.runtime.operators.registry import form_of
from autopar.sharding.communication import COMMUNICATIONS
from autopar.sharding.program import talking
from autopar.sharding.rules.experts import EXPERTS


def localise(call: LocalCall) -> LocalOperator:
    """The local form of an operator; kinds without a row in the table run unchanged."""
    kind = call.operator.kind
    form = form_of(kind)
    attributes = dict(call.operator.attributes)
    if kind == EXPERTS:
        attributes = by_recipe(attributes)
    # What a price alone reads.
    attributes.pop("compute", None)
    if form.sizes is not None:
        attributes.update(form.sizes(call))
    function = function_of(kind)
    # Axes of size 1 have nobody to talk to.
    axis_sets = [tuple(a for a in axes if call.mesh[a] > 1) for axes in talking(call.decision)]
    for axes in filter(None, axis_sets):
        word = call.decision.options[axes[0]].communication
        assert word is not None
        talks = form_of(word).talks
        assert talks is not None, word
        row = COMMUNICATIONS[word]
        if row.in_turn:
            groups = [call.over((axis,)) for axis in axes]
        else:
            groups = [call.over(axes if row.joins and not row.stacks else axes[:1])]
        function, changes = talks(call, *groups)
        attributes.update(changes)
    if not any(axis_sets) and form.knows is not None and form.local is not None:
        knowledge = form.knows(call)
        if knowledge is not None:
            function = form.local
            attributes.update(knowledge)
    # Such a mean of this rank's part is that part's own.
    alone = attributes.pop("cross_batch", False)
    scale = 1.0 if alone else 1.0 / call.degree(reduction="mean")
    return LocalOperator(function=function, attributes=attributes, scale=scale)
