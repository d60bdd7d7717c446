"""Norms in one operator, however they are spelled.

rms_norm     x (mean(x²) + eps)^-½ weight
layer_norm   u = x - mean(x):   u (mean(u²) + eps)^-½ weight + bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir import Operator, Ref, Value

from .spelling import Spelling, beside, word


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A norm over the last `dims` dims of `source`, as far as the tensor `made`."""

    source: str
    made: str
    dims: int
    eps: float
    centred: bool
    weight: str | None = None
    bias: str | None = None


def norm(operator: Operator, spelling: Spelling) -> Operator | None:
    """The norm of which an operator is the quotient, with its scale and its casts."""
    read = _quotient(operator, spelling)
    if read is None:
        return None
    forms = [read, *_scaled(read, spelling)]
    for form in reversed(forms):
        source = spelling.uncast(form.source)
        for whole in (_uncast(form, spelling), replace(form, source=source), form):
            ends = [whole.source, form.made, *filter(None, (whole.weight, whole.bias))]
            # Kernels of norms have one type, and compute in single precision at least.
            narrowed = spelling.width(whole.source) > spelling.width(form.source)
            if len({spelling.dtype(name) for name in ends}) == 1 and not narrowed:
                return _operator(whole, operator, spelling)
    return None


def _uncast(form: _Norm, spelling: Spelling) -> _Norm:
    """The norm of what was cast for it."""
    weight, bias = (name and spelling.uncast(name) for name in (form.weight, form.bias))
    return replace(form, source=spelling.uncast(form.source), weight=weight, bias=bias)


def _quotient(operator: Operator, spelling: Spelling) -> _Norm | None:
    """The norm without a scale: a tensor times the inverse root of its mean square."""
    sign = {"mul": 1.0, "div": -1.0}.get(word(operator))
    if sign is None:
        return None
    for value, root in list(spelling.pairs(operator))[: 2 if sign > 0 else 1]:
        base, exponent = spelling.power(root)
        add = spelling.maker(base, "add")
        if exponent * sign != -0.5 or add is None or add.attributes.get("alpha", 1) != 1:
            continue
        eps = spelling.number(add, "other", 1)
        mean = spelling.maker(spelling.uncast(add.inputs[0]), "mean")
        if eps is None or mean is None or spelling.shape(value) != spelling.shape(mean.inputs[0]):
            continue
        dims = _last_dims(mean, spelling)
        squared, by = spelling.power(mean.inputs[0])
        if dims and by == 2.0 and squared == spelling.uncast(value):
            read = _Norm(source=value, made=operator.outputs[0], dims=dims, eps=eps, centred=False)
            return _centred(read, spelling)
    return None


def _last_dims(mean: Operator, spelling: Spelling) -> int:
    """The number of last dims over which a mean is taken that keeps them; 0 for other means."""
    rank = len(spelling.shape(mean.inputs[0]))
    given = mean.attributes.get("dim")
    dims = given if isinstance(given, tuple) else (given,)
    places = sorted(dim % rank for dim in dims if isinstance(dim, int))
    stay = mean.attributes.get("keepdim") is True
    return len(places) if stay and places == list(range(rank - len(places), rank)) else 0


def _centred(read: _Norm, spelling: Spelling) -> _Norm:
    """The layer norm, where the tensor is one less its mean."""
    less = spelling.maker(spelling.uncast(read.source), "sub")
    if less is None or len(less.inputs) != 2 or less.attributes.get("alpha", 1) != 1:
        return read
    mean = spelling.maker(spelling.uncast(less.inputs[1]), "mean")
    same = mean is not None and spelling.uncast(mean.inputs[0]) == spelling.uncast(less.inputs[0])
    if mean is None or not same or _last_dims(mean, spelling) != read.dims:
        return read
    return replace(read, source=less.inputs[0], centred=True)


def _scaled(read: _Norm, spelling: Spelling) -> list[_Norm]:
    """The norm with what follows it and nothing else reads: casts, a scale, a bias."""
    forms = []
    shape = spelling.shape(read.made)[-read.dims :]
    while (reader := spelling.reader(read.made)) is not None:
        other = next((name for name in reader.inputs if name != read.made), None)
        along = other is not None and spelling.shape(other) == shape
        made = reader.outputs[0]
        if spelling.casts(reader):
            read = replace(read, made=made)
        elif along and word(reader) == "mul" and read.weight is None:
            read = replace(read, made=made, weight=other)
        elif along and word(reader) == "add" and read.centred and read.weight and not read.bias:
            read = replace(read, made=made, bias=other)
        else:
            break
        forms.append(read)
    return forms


def _operator(form: _Norm, operator: Operator, spelling: Spelling) -> Operator:
    kind = "layer_norm" if form.centred else "rms_norm"
    shape = spelling.shape(form.made)[-form.dims :]
    given: dict[str, Value] = {"input": Ref(0), "normalized_shape": shape}
    inputs = [form.source]
    for formal, name in (("weight", form.weight), ("bias", form.bias)):
        if name is not None:
            given[formal] = Ref(len(inputs))
            inputs.append(name)
    return Operator(
        name=beside(operator, kind),
        kind=f"aten.{kind}.default",
        inputs=tuple(inputs),
        outputs=(form.made,),
        attributes={**given, "eps": form.eps},
    )
