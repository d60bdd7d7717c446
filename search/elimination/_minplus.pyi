"""The compiled min-plus kernel."""

from ..tables import Table

def minimise(out: Table, terms: tuple[Table, ...], /) -> None: ...
