"""From global to local: the function that a rank runs for an operator, and its attributes there."""

from __future__ import annotations

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
    talking = [(axis, o.communication) for axis, o in enumerate(call.decision.options) if o.communication and call.mesh[axis] > 1]
    for axis, word in talking:
        talks = form_of(word).talks
        assert talks is not None, word
        function, changes = talks(call, call.groups[axis])
        attributes.update(changes)
    if not talking and form.knows is not None and form.local is not None and (told := form.knows(call)) is not None:
        function = form.local
        attributes.update(told)
    alone = attributes.pop("cross_batch", False)  # a mean of this rank's part is that part's own
    return LocalOperator(function=function, attributes=attributes, scale=1.0 if alone else 1.0 / call.degree(reduction="mean"))
