"""Sample calls of complex numbers and transforms, linear algebra, reductions, scans and orders, and
random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import bools, exists, f, ints, n, names
from tests.sharding.values import by_order, spd, z

_OF_MATRICES = """linalg_inv linalg_inv_ex inverse linalg_det det _linalg_det linalg_slogdet
    slogdet _linalg_slogdet logdet linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse
    linalg_qr qr linalg_svdvals linalg_eigh _linalg_eigh linalg_eigvalsh linalg_matrix_exp
    matrix_exp linalg_pinv pinverse linalg_lu linalg_lu_factor linalg_lu_factor_ex
    linalg_ldl_factor linalg_ldl_factor_ex linalg_cond linalg_svd _linalg_svd svd
    linalg_eigvals"""


def complexes() -> Iterator[Sample]:
    """Complex numbers and Fourier transforms."""
    yield sample("aten.view_as_complex.default", self=n(6, 12, 2))
    yield sample("aten.view_as_real.default", self=z(6, 12))
    for name in ("real", "imag", "angle"):
        yield sample(f"aten.{name}.default", "complex", self=z(6, 12))
    yield sample("aten.complex.default", real=n(6, 12), imag=n(6, 12))
    yield sample("aten.polar.default", abs=f(6, 12), angle=n(6, 12))
    for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
        value = n(6, 6, 6) if name in ("rfft", "ihfft") else z(6, 6, 6)
        yield sample(f"aten.fft_{name}.default", self=value)
        yield sample(f"aten.fft_{name}.default", "dim", self=value, n=4, dim=1)
        yield sample(f"aten.fft_{name}2.default", self=value)
        yield sample(f"aten.fft_{name}2.default", "dims", self=value, dim=[0, 2])
        yield sample(f"aten.fft_{name}n.default", self=value)
        yield sample(f"aten.fft_{name}n.default", "sizes", self=value, s=[6, 6])
        yield sample(f"aten.fft_{name}n.default", "dims", self=value, dim=[1])
    for name in ("fftshift", "ifftshift"):
        yield sample(f"aten.fft_{name}.default", self=n(6, 6))
        yield sample(f"aten.fft_{name}.default", "dim", self=n(6, 6), dim=[1])
    yield sample("aten._fft_c2c.default", self=z(6, 6), dim=[1], normalization=0, forward=True)
    yield sample("aten._fft_r2c.default", self=n(6, 6), dim=[0], normalization=0, onesided=True)
    yield sample("aten._fft_c2r.default", self=z(6, 4), dim=[1], normalization=0, last_dim_size=6)
    window = torch.hann_window(6, dtype=torch.float64)
    for lead in ((6,), ()):
        yield sample(
            "aten.stft.center",
            f"{lead}",
            self=n(*lead, 24),
            n_fft=6,
            hop_length=3,
            window=window,
            return_complex=True,
        )
        yield sample(
            "aten.stft.default",
            f"{lead}",
            self=n(*lead, 24),
            n_fft=6,
            hop_length=3,
            window=window,
            return_complex=True,
        )
        yield sample(
            "aten.istft.default",
            f"{lead}",
            self=z(*lead, 4, 9),
            n_fft=6,
            hop_length=3,
            window=window,
        )


def algebra() -> Iterator[Sample]:
    """Linear algebra on batches of matrices, and products."""
    for name in _OF_MATRICES.split():
        kind = f"aten.{name}.default"
        # Torch 2.15 has no aten.cholesky any more.
        if not exists(kind):
            continue
        given = {"rcond": 1e-6} if name == "linalg_pinv" else {}
        yield sample(kind, **{names(kind)[0]: spd(6, 6, 3)}, **given)
    for name in ("linalg_pinv.atol_rtol_float", "linalg_matrix_rank.atol_rtol_float"):
        yield sample(f"aten.{name}", **{names(f"aten.{name}")[0]: spd(6, 3)}, rtol=1e-6)
    yield sample("aten.linalg_matrix_rank.default", self=spd(6, 3), tol=1e-6)
    for name in ("linalg_matrix_power", "matrix_power"):
        yield sample(f"aten.{name}.default", self=spd(6, 3), n=2)
    lu, pivots = torch.linalg.lu_factor(spd(6, 3))
    yield sample("aten.lu_unpack.default", LU_data=lu, LU_pivots=pivots)
    yield sample("aten.linalg_lu_solve.default", LU=lu, pivots=pivots, B=n(6, 3, 2))
    yield sample("aten.lu_solve.default", self=n(6, 3, 2), LU_data=lu, LU_pivots=pivots)
    ld, places_, _ = torch.ops.aten.linalg_ldl_factor_ex(spd(6, 3))
    yield sample("aten.linalg_ldl_solve.default", LD=ld, pivots=places_, B=n(6, 3, 2))
    for name in ("linalg_householder_product.default", "orgqr.default"):
        yield by_order(f"aten.{name}", "", n(6, 6, 3, 2), n(6, 6, 2))
    for kind in (
        "aten.linalg_solve.default",
        "aten.linalg_solve_ex.default",
        "aten._linalg_solve_ex.default",
    ):
        yield sample(kind, "matrices", A=spd(6, 3), B=n(6, 3, 2))
        yield sample(kind, "vectors", A=spd(6, 6, 3), B=n(6, 6, 3))
        yield sample(kind, "broadcast", A=spd(6, 1, 3), B=n(6, 3, 2))
        yield sample(kind, "vector", A=spd(3), B=n(3))
    yield sample("aten.linalg_lstsq.default", self=n(6, 4, 2), b=n(6, 4, 2), driver="gelsd")
    yield sample("aten.linalg_solve_triangular.default", self=spd(6, 3), B=n(6, 3, 2), upper=True)
    yield sample("aten.triangular_solve.default", self=n(6, 3, 2), A=spd(6, 3))
    yield sample(
        "aten.cholesky_solve.default", self=n(6, 3, 2), input2=torch.linalg.cholesky(spd(6, 3))
    )
    yield sample("aten.linalg_cross.default", self=n(6, 3, 6), other=n(1, 3, 6), dim=1)
    yield sample("aten.linalg_cross.default", "last", self=n(6, 3), other=n(6, 3))
    yield sample("aten.linalg_vecdot.default", x=n(6, 6, 3), y=n(6, 3))
    yield sample("aten.linalg_vecdot.default", "dim", x=n(6, 6, 3), y=n(6, 6, 3), dim=0)
    yield sample("aten.cosine_similarity.default", x1=n(6, 12, 6), x2=n(6, 12, 6))
    yield sample("aten.cosine_similarity.default", "dim", x1=n(6, 12), x2=n(6, 12), dim=-1)
    for keep in (False, True):
        yield sample(
            "aten.pairwise_distance.default", f"{keep}", x1=n(6, 12), x2=n(6, 12), keepdim=keep
        )
    yield sample("aten.cdist.default", x1=n(6, 6, 3), x2=n(6, 12, 3))
    yield sample("aten.cdist.default", "broadcast", x1=n(6, 3), x2=n(6, 12, 3), p=1.0)
    yield sample("aten._euclidean_dist.default", x1=n(6, 6, 3), x2=n(6, 12, 3))
    yield sample(
        "aten._cdist_forward.default", x1=n(6, 6, 3), x2=n(6, 12, 3), p=2.0, compute_mode=None
    )
    for kind in ("aten.chain_matmul.default", "aten.linalg_multi_dot.default"):
        first = names(kind)[0]
        yield sample(kind, **{first: [n(6, 12), n(12, 6), n(6, 2)]})
    yield sample("aten.linalg_multi_dot.default", "ends", tensors=[n(6), n(6, 12), n(12)])
    yield sample(
        "aten.tensordot.default",
        self=n(6, 12, 2),
        other=n(2, 6, 12),
        dims_self=[2, 0],
        dims_other=[0, 1],
    )
    yield sample(
        "aten.tensordot.default",
        "negative",
        self=n(6, 12),
        other=n(12, 6),
        dims_self=[-1],
        dims_other=[0],
    )
    yield sample(
        "aten.tensordot.default", "outer", self=n(6), other=n(12), dims_self=[], dims_other=[]
    )
    for left, right in (((6, 12), (6, 2, 12)), ((6,), (6,)), ((), (6, 6)), ((6,), ())):
        yield sample("aten.inner.default", f"{left} {right}", self=n(*left), other=n(*right))
    for left, right in (((6, 12), (12, 6)), ((6, 2, 12), (12,)), ((6, 2, 12), (6, 12, 6))):
        yield sample(
            "aten.linalg_matmul.default", f"{left} {right}", self=n(*left), other=n(*right)
        )
    for left, right in (((6, 2), (2, 6)), ((6,), (2, 6)), ((6, 2), (6,))):
        yield sample("aten.kron.default", f"{left} {right}", self=n(*left), other=n(*right))
    yield sample(
        "aten.linear.default", "weight of one dim", input=n(6, 12), weight=n(12), bias=None
    )
    yield sample("aten.ger.default", self=n(6), vec2=n(12))
    yield sample("aten.vdot.default", self=n(12), other=n(12))
    yield sample("aten.vdot.default", "complex", self=z(12), other=z(12))
    yield sample(
        "aten.bilinear.default",
        input1=n(6, 2, 6),
        input2=n(6, 2, 12),
        weight=n(6, 6, 12),
        bias=n(6),
    )
    yield sample(
        "aten.bilinear.default", "no bias", input1=n(6, 6), input2=n(6, 12), weight=n(6, 6, 12)
    )
    for shape in ((6, 12), (12,), ()):
        yield sample(
            "aten.addbmm.default",
            f"{shape}",
            self=n(*shape),
            batch1=n(6, 6, 2),
            batch2=n(6, 2, 12),
            beta=0.5,
            alpha=2,
        )
        yield sample("aten.addr.default", f"{shape}", self=n(*shape), vec1=n(6), vec2=n(12))
        yield sample(
            "aten._addmm_activation.default",
            f"{shape}",
            self=n(*shape),
            mat1=n(6, 6),
            mat2=n(6, 12),
        )
        yield sample("aten.addmm.default", f"{shape}", self=n(*shape), mat1=n(6, 6), mat2=n(6, 12))
    for shape in ((6, 2, 6), (2, 6), (6,), (), (1, 1, 6)):
        yield sample(
            "aten.baddbmm.default",
            f"{shape}",
            self=n(*shape),
            batch1=n(6, 2, 12),
            batch2=n(6, 12, 6),
        )
    for shape in ((6,), (1,), ()):
        yield sample("aten.addmv.default", f"{shape}", self=n(*shape), mat=n(6, 12), vec=n(12))
    yield sample(
        "aten._int_mm.default", self=ints(24, 24).to(torch.int8), mat2=ints(24, 24).to(torch.int8)
    )
    for name in ("pdist", "_pdist_forward", "cov", "corrcoef"):
        yield by_order(f"aten.{name}.default", "", n(6, 6))
    yield sample("aten.dist.default", self=n(6, 6), other=n(6, 6))
    yield sample("aten.linalg_tensorinv.default", self=spd(4).reshape(2, 2, 4), ind=2)
    yield sample("aten.linalg_tensorsolve.default", self=spd(4).reshape(2, 2, 4), other=n(2, 2))
    yield sample("aten.linalg_vander.default", x=n(6, 3))
    yield sample("aten.vander.default", x=n(6))


def counts() -> Iterator[Sample]:
    """More reductions, scans and orders."""
    for name in ("max", "min", "median", "nanmedian"):
        for dim, keep in ((0, False), (1, True), (-1, False)):
            yield sample(
                f"aten.{name}.dim", f"{dim} {keep}", self=n(6, 6, 6), dim=dim, keepdim=keep
            )
    yield sample("aten.max.dim", "number", self=n(), dim=0)
    for name in ("kthvalue", "mode"):
        given = {"k": 2} if name == "kthvalue" else {}
        yield sample(f"aten.{name}.default", self=n(6, 6, 6), **given)
        yield sample(f"aten.{name}.default", "dim", self=n(6, 6, 6), **given, dim=1, keepdim=True)
    for name in ("median", "nanmedian", "nanmean", "nansum", "count_nonzero", "nuclear_norm"):
        yield sample(f"aten.{name}.default", self=n(6, 6))
    for keep in (False, True):
        for name in ("nansum", "nanmean"):
            yield sample(
                f"aten.{name}.default", f"dim {keep}", self=n(6, 6, 6), dim=[1, -1], keepdim=keep
            )
        yield sample("aten.prod.dim_int", f"{keep}", self=f(6, 6), dim=1, keepdim=keep)
        for name in ("var", "std", "var_mean", "std_mean"):
            yield sample(
                f"aten.{name}.dim",
                f"{keep}",
                self=n(6, 6, 6),
                dim=[0, 2],
                unbiased=False,
                keepdim=keep,
            )
            yield sample(
                f"aten.{name}.correction",
                f"{keep}",
                self=n(6, 6, 6),
                dim=[-1],
                correction=0,
                keepdim=keep,
            )
        for name, given in (
            ("norm.ScalarOpt_dim", {"p": 2}),
            ("norm.ScalarOpt_dim_dtype", {"p": 1, "dtype": "float64"}),
            ("linalg_norm.default", {"ord": 2}),
            ("frobenius_norm.dim", {}),
        ):
            yield sample(f"aten.{name}", f"{keep}", self=f(6, 6, 6), dim=[1], keepdim=keep, **given)
        yield sample(
            "aten.special_logsumexp.default", f"{keep}", self=n(6, 6), dim=[1], keepdim=keep
        )
        yield sample("aten.linalg_norm.default", f"all {keep}", self=n(6, 6), keepdim=keep)
        yield sample(
            "aten.linalg_norm.ord_str",
            f"{keep}",
            self=n(6, 6, 6),
            ord="fro",
            dim=[0, 2],
            keepdim=keep,
        )
        yield sample(
            "aten.linalg_matrix_norm.default", f"{keep}", self=n(6, 6, 3), ord=1, keepdim=keep
        )
        yield sample(
            "aten.linalg_matrix_norm.str_ord",
            f"{keep}",
            self=n(6, 6, 6),
            ord="fro",
            dim=[0, 1],
            keepdim=keep,
        )
        for name in ("any", "all"):
            yield sample(f"aten.{name}.dim", f"{keep}", self=bools(6, 6), dim=1, keepdim=keep)
            yield sample(
                f"aten.{name}.dims", f"{keep}", self=bools(6, 6, 6), dim=[0, -1], keepdim=keep
            )
        yield sample("aten.aminmax.default", f"{keep}", self=n(6, 6), dim=1, keepdim=keep)
        for name in ("quantile", "nanquantile"):
            yield sample(
                f"aten.{name}.default", f"{keep}", self=f(6, 6, 6), q=f(3), dim=1, keepdim=keep
            )
            yield sample(
                f"aten.{name}.scalar", f"{keep}", self=f(6, 6), q=0.3, dim=-1, keepdim=keep
            )
    for name in ("var", "std", "var_mean", "std_mean"):
        yield sample(f"aten.{name}.default", self=n(6, 6))
        yield sample(f"aten.{name}.correction", "all", self=n(6, 6), correction=1)
    for name in ("any", "all", "_is_all_true", "_is_any_true"):
        yield sample(f"aten.{name}.default", self=bools(6, 6))
    yield sample("aten.aminmax.default", "all", self=n(6, 6))
    yield sample("aten.count_nonzero.dim_IntList", self=bools(6, 6), dim=[1])
    yield sample("aten.count_nonzero.default", "dim", self=ints(6, 6), dim=1)
    yield sample("aten.norm.Scalar", self=n(6, 6), p=2)
    yield sample("aten.norm.ScalarOpt_dtype", self=n(6, 6), p=2, dtype="float64")
    yield sample("aten.quantile.default", "all", self=f(6, 6), q=f())
    yield sample("aten.renorm.default", self=n(6, 6, 6), p=2, dim=1, maxnorm=0.5)
    for dim in (0, -1):
        for name in ("cumprod", "logcumsumexp", "cummax", "cummin"):
            yield sample(f"aten.{name}.default", f"{dim}", self=f(6, 6, 6), dim=dim)
        yield sample("aten.argsort.stable", f"{dim}", self=n(6, 6), stable=True, dim=dim)
    yield sample("aten.cumprod.default", "number", self=f(), dim=0)
    yield sample("aten.msort.default", self=n(6, 12))


def chances() -> Iterator[Sample]:
    """Random numbers, drawn as on one device."""
    yield sample("aten.native_dropout.default", input=n(6, 12), p=0.4, train=True)
    yield sample("aten.native_dropout.default", "untold", input=n(6, 12), p=0.4, train=None)
    yield sample("aten.native_dropout.default", "evaluated", input=n(6, 12), p=0.4, train=False)
    for name in ("alpha_dropout", "feature_alpha_dropout"):
        yield sample(f"aten.{name}.default", input=n(6, 12), p=0.4, train=True)
    yield sample("aten.rrelu.default", self=n(6, 12), training=True)
    for name in ("rand", "randn"):
        yield sample(f"aten.{name}.default", size=[6, 6])
    yield sample("aten.randint.default", high=6, size=[6, 6])
    yield sample("aten.randint.low", low=2, high=6, size=[6, 6])
    yield sample("aten.randperm.default", n=6)
    for name in (
        "bernoulli.default",
        "poisson.default",
        "uniform.default",
        "exponential.default",
        "normal_functional.default",
        "log_normal.default",
        "cauchy.default",
        "random.default",
    ):
        yield by_order(f"aten.{name}", "", f(6, 12))
    yield sample("aten.bernoulli.p", self=f(6, 12), p=0.3)
    yield sample("aten.bernoulli.Tensor", self=f(6, 12), p=f(6, 12))
    yield sample("aten.geometric.default", self=f(6, 12), p=0.3)
    yield sample("aten.random.from", **{"self": f(6, 12), "from": 2, "to": 9})
    yield sample("aten.random.to", self=f(6, 12), to=9)
    yield sample(
        "aten.binomial.default", count=torch.full((6, 12), 5.0, dtype=torch.float64), prob=f(6, 12)
    )
    yield sample("aten.multinomial.default", self=f(6, 12), num_samples=3)
    yield sample("aten.normal.float_float", mean=0.0, std=1.0, size=[6, 6])
    yield sample("aten.normal.Tensor_float", mean=n(6, 6), std=1.0)
    yield sample("aten.normal.float_Tensor", mean=0.0, std=f(6, 6))
    yield sample("aten.normal.Tensor_Tensor", mean=n(6, 6), std=f(6, 6))


def constants() -> Iterator[Sample]:
    """More tensors made from nothing."""
    for name, given in (
        ("linspace.default", {"start": 0, "end": 1, "steps": 6}),
        ("logspace.default", {"start": 0, "end": 1, "steps": 6}),
        ("range.step", {"start": 0, "end": 5, "step": 1}),
        ("tril_indices.default", {"row": 6, "col": 6}),
        ("triu_indices.default", {"row": 6, "col": 6}),
        ("eye.m", {"n": 6, "m": 12}),
        ("fft_fftfreq.default", {"n": 6}),
        ("fft_rfftfreq.default", {"n": 6}),
        ("hann_window.periodic", {"window_length": 6, "periodic": False}),
    ):
        yield sample(f"aten.{name}", **given)
    for name in ("hann", "hamming", "blackman", "bartlett", "kaiser"):
        yield sample(f"aten.{name}_window.default", window_length=6)
    for size in ([6, 12], [6, 6, 12], [12]):
        for name in ("zeros", "ones"):
            yield sample(f"aten.new_{name}.default", f"{size}", self=n(6, 12), size=size)


_ALL = (complexes, algebra, counts, chances, constants)
FAMILIES = {family.__name__: family for family in _ALL}
