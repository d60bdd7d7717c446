"""Products as a library runs them that has constants of its own."""

from __future__ import annotations

import numpy as np

from autopar.costmodel.device.products import Floats, Product, ProductForm, Speed, uncached


def seconds_in(
    form: ProductForm,
    library: str,
    product: Product,
    speed: Speed,
    *,
    itemsize: float,
    sustained: bool = True,
) -> Floats:
    """Return the seconds of products as a library runs them, if it has constants of its own."""
    seconds = form.seconds(product, speed, itemsize=itemsize, sustained=sustained)
    if library not in form.libraries:
        return seconds
    own = form.libraries[library]
    read = 2 * product.batch * product.m * product.k
    return np.asarray(
        own.factor * seconds + own.start + own.passes * uncached(read, own.held) / speed.memory
    )
