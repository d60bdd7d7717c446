"""From global to local: the function that a rank runs for an operator, and its attributes there."""

from __future__ import annotations

from autopar.sharding.communication import COMMUNICATIONS
from autopar.sharding.program import talking

from .functions import function_of
from .local_call import LocalCall, LocalOperator
from .local_forms.registry import form_of


def localise(call: LocalCall) -> LocalOperator:
    """The local form of an operator; kinds without a row in the table run unchanged."""
    kind = call.operator.kind
    form = form_of(kind)
    attributes = dict(call.operator.attributes)
    if form.sizes is not None:
        attributes.update(form.sizes(call))
    function = function_of(kind)
    found = [tuple(axis for axis in axes if call.mesh[axis] > 1) for axes in talking(call.decision)]
    for axes in filter(None, found):
        word = call.decision.options[axes[0]].communication
        assert word is not None
        talks = form_of(word).talks
        assert talks is not None, word
        function, changes = talks(call, call.over(axes if COMMUNICATIONS[word].joins and not COMMUNICATIONS[word].stacks else axes[:1]))
        attributes.update(changes)
    if not any(found) and form.knows is not None and form.local is not None and (told := form.knows(call)) is not None:
        function = form.local
        attributes.update(told)
    alone = attributes.pop("cross_batch", False)  # a mean of this rank's part is that part's own
    return LocalOperator(function=function, attributes=attributes, scale=1.0 if alone else 1.0 / call.degree(reduction="mean"))
