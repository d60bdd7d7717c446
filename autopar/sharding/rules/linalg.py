"""Rules of linear algebra: batches of matrices are split, matrices themselves only where a product
sums over them.
"""

from __future__ import annotations

from collections.abc import Callable

from .contraction import matmul_dims
from .registry import Call, register
from .selection import all_whole
from .shape import letters, listed
from .spelling import whole


def _matrices(*trailing: int) -> Callable[[Call], str]:
    """Batches broadcast; the last `trailing[i]` dims of input i are one matrix or vector.

    Inputs beyond `trailing` have as many such dims as its last entry says.
    """

    def rule(call: Call) -> str:
        count = [trailing[min(i, len(trailing) - 1)] for i in range(len(call.inputs))]
        depth = max(len(t.shape) - c for t, c in zip(call.inputs, count, strict=True))
        names = letters(depth)
        spelled = []
        for i, (tensor, own) in enumerate(zip(call.inputs, count, strict=True)):
            lead = len(tensor.shape) - own
            spelled.append(" ".join([*names[depth - lead :], whole(tensor.shape[lead:], f"m{i}_")]))
        batch = call.outputs[0].shape[
            :depth
        ]  # a further output may be left empty, without the batch
        alike = [t.shape[:depth] == batch for t in call.outputs]
        sides = [(i, t.shape, names if alike[i] else []) for i, t in enumerate(call.outputs)]
        outs = [" ".join([*lead, whole(shape[len(lead) :], f"o{i}_")]) for i, shape, lead in sides]
        return f"{', '.join(spelled)} -> {', '.join(outs)}"

    return rule


def _solve(call: Call) -> str:
    """`A x = b`, where b is a batch of matrices, or of vectors if it has A's shape without the last
    dim.
    """
    left = call.inputs[0].shape
    right = call.inputs[1].shape
    # torch decides so, too: such a right side is a batch of vectors, and never one matrix.
    vector = len(right) == 1 or (len(right) == len(left) - 1 and right == left[:-1])
    return _matrices(2, 1 if vector else 2)(call)


def _along_whole(call: Call) -> str:
    """`cross`, `vecdot`, distances, similarities: vectors along a dim of tensors that broadcast.

    The vectors stay whole.
    """
    rank = max(len(t.shape) for t in call.inputs)
    if rank == 0:
        return all_whole(call)
    dim = call.integer("dim", default=1 if "cosine" in call.operator.kind else -1) % rank
    names = letters(rank)
    marked = [f"!{name}" if i == dim else name for i, name in enumerate(names)]
    ins = [" ".join(marked[rank - len(t.shape) :]) for t in call.inputs]
    out = (
        marked
        if call.operator.kind.endswith("cross.default")
        else [name for i, name in enumerate(names) if i != dim]
    )
    if len(call.outputs[0].shape) == rank and out is not marked:
        out = [*names[:dim], "1", *names[dim + 1 :]]
    return f"{', '.join(ins)} -> {' '.join(out)}"


def _chain(call: Call) -> str:
    """`A B C`: the first may be a row and the last a column."""
    count = len(call.inputs)
    names = [f"f{i}" for i in range(count + 1)]
    ins = [[names[i], names[i + 1]] for i in range(count)]
    if len(call.inputs[0].shape) == 1:
        ins[0] = ins[0][1:]
    if len(call.inputs[-1].shape) == 1:
        ins[-1] = ins[-1][:1]
    out = [
        *(names[:1] if len(call.inputs[0].shape) == 2 else []),
        *(names[-1:] if len(call.inputs[-1].shape) == 2 else []),
    ]
    # Each inner dim is summed once, in whatever order the products are taken.
    summed = names[1:-1]
    tail = f" | {', '.join(summed)}: sum" if summed else ""
    return f"{', '.join(' '.join(dims) for dims in ins)} -> {' '.join(out)}{tail}"


def _tensordot(call: Call) -> str:
    """Dims of one side are summed against dims of the other."""
    left = call.inputs[0].shape
    right = call.inputs[1].shape
    one = [f"l{i}" for i in range(len(left))]
    two = [f"r{i}" for i in range(len(right))]
    summed = []
    for i, j in zip(
        listed(call.get("dims_self"), len(left)),
        listed(call.get("dims_other"), len(right)),
        strict=True,
    ):
        two[j] = one[i]
        summed.append(one[i])
    out = [name for name in (*one, *two) if name not in summed]
    tail = f" | {', '.join(summed)}: sum" if summed else ""
    return f"{' '.join(one)}, {' '.join(two)} -> {' '.join(out)}{tail}"


def _inner(call: Call) -> str:
    """The last dims are summed against each other, all others are kept; a number multiplies."""
    left = call.inputs[0].shape
    right = call.inputs[1].shape
    if not left or not right:
        return "*, * -> *"
    one = [f"l{i}" for i in range(len(left) - 1)]
    two = [f"r{i}" for i in range(len(right) - 1)]
    return f"{' '.join([*one, 'k'])}, {' '.join([*two, 'k'])} -> {' '.join([*one, *two])} | k: sum"


def _kron(call: Call) -> str:
    """Every dim of the result is compound: the left's dim outside, the right's dim inside."""
    left = call.inputs[0].shape
    right = call.inputs[1].shape
    rank = max(len(left), len(right))
    one = [f"l{i}" for i in range(rank)]
    two = [f"r{i}" for i in range(rank)]
    outs = []
    for i in range(rank):
        held = [
            *([one[i]] if i >= rank - len(left) else []),
            *([two[i]] if i >= rank - len(right) else []),
        ]
        outs.append(f"({' '.join(held)})" if len(held) > 1 else held[0])
    return (
        f"{' '.join(one[rank - len(left) :])}, {' '.join(two[rank - len(right) :])} -> "
        f"{' '.join(outs)}"
    )


def _added(product: str, dims: str) -> Callable[[Call], str]:
    """`beta * self + alpha * product`: `self` broadcasts to the result and comes once."""

    def rule(call: Call) -> str:
        names = dims.split()
        rank = len(call.inputs[0].shape)
        left, _, right = product.partition(" -> ")
        return f"+{' '.join(names[len(names) - rank :])}, {left} -> {right}"

    return rule


def _row_products(call: Call) -> str:
    left, right, out = matmul_dims(*(len(t.shape) for t in (*call.inputs, *call.outputs)))
    return f"{left}, {right} -> {out} | k: sum"


register(
    """aten.linalg_inv.default aten.linalg_inv_ex.default aten.inverse.default
    aten.linalg_det.default aten.det.default aten._linalg_det.default aten.linalg_slogdet.default
    aten.slogdet.default aten._linalg_slogdet.default aten.logdet.default
    aten.linalg_cholesky.default aten.linalg_cholesky_ex.default aten.cholesky.default
    aten.cholesky_inverse.default aten.linalg_qr.default aten.qr.default aten.linalg_svd.default
    aten._linalg_svd.default aten.svd.default aten.linalg_svdvals.default aten.linalg_eigh.default
    aten._linalg_eigh.default aten.linalg_eigvalsh.default aten.linalg_matrix_exp.default
    aten.matrix_exp.default aten.linalg_matrix_power.default aten.matrix_power.default
    aten.linalg_pinv.default aten.linalg_pinv.atol_rtol_float aten.pinverse.default
    aten.linalg_lu.default aten.linalg_lu_factor.default aten.linalg_lu_factor_ex.default
    aten.linalg_cond.default aten.lu_unpack.default""",
    _matrices(2, 1),
)
register("aten.linalg_eigvals.default", _matrices(2))
register(
    "aten.linalg_ldl_factor.default aten.linalg_ldl_factor_ex.default",
    _matrices(2),
    differentiable=False,
)
register(
    "aten.linalg_matrix_rank.default aten.linalg_matrix_rank.atol_rtol_float",
    _matrices(2),
    differentiable=False,
)
register("aten.linalg_householder_product.default aten.orgqr.default", _matrices(2, 1))
register(
    "aten.linalg_solve.default aten.linalg_solve_ex.default aten._linalg_solve_ex.default", _solve
)
register("aten.linalg_lstsq.default", _solve)
register(
    "aten.linalg_solve_triangular.default aten.triangular_solve.default "
    "aten.cholesky_solve.default",
    _matrices(2),
)
register("aten.linalg_lu_solve.default", _matrices(2, 1, 2))
register("aten.linalg_ldl_solve.default", _matrices(2, 1, 2), differentiable=False)
register("aten.lu_solve.default", _matrices(2, 2, 1))
register("aten.linalg_cross.default", _along_whole, linear=((0,), (1,)))
register("aten.linalg_vecdot.default", _along_whole, linear=((0,), (1,)))
register("aten.cosine_similarity.default aten.pairwise_distance.default", _along_whole)
# A root follows the sum over the vectors' width, so the width stays whole.
register(
    "aten.cdist.default aten._cdist_forward.default aten._euclidean_dist.default",
    "* m !k, * n !k -> * m n",
)
register("aten.chain_matmul.default aten.linalg_multi_dot.default", _chain, linear=((0,), (1,)))
register("aten.tensordot.default", _tensordot, linear=((0,), (1,)), products=("",))
register("aten.inner.default", _inner, linear=((0,), (1,)), products=("",))
register("aten.linalg_matmul.default", _row_products, linear=((0,), (1,)), products=("",))
register("aten.kron.default", _kron, linear=((0,), (1,)))
register("aten.ger.default", "m, n -> m n", linear=((0,), (1,)), products=("",))
register("aten.vdot.default", "k, k -> | k: sum", products=("",))
register("aten.bilinear.default", "* i, * j, o i j, +o -> * o | i, j: sum", products=("",))
register("aten.addbmm.default", _added("b m k, b k n -> m n | b, k: sum", "m n"), products=("",))
register("aten.addmv.default", _added("m k, k -> m | k: sum", "m"), products=("",))
register("aten.addr.default", _added("m, n -> m n", "m n"))
register("aten._int_mm.default", "m k, k n -> m n | k: sum", products=("",))
# The activation comes after the sum, so the sum has to be complete.
register(
    "aten._addmm_activation.default",
    _added("m !k, !k n -> m n", "m n"),
    products=("",),
    differentiable=False,
)
register(
    """aten.pdist.default aten._pdist_forward.default aten.cov.default aten.corrcoef.default
    aten.dist.default aten.linalg_tensorinv.default aten.linalg_tensorsolve.default
    aten.linalg_vander.default""",
    all_whole,
)
