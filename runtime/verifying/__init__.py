"""Whether a sharding that someone else wrote computes what the whole model does: executed on ranks, operator by operator."""

from .case import Case, case_named, styles_case
from .run import Verdict, verify
from .watching import Finding

__all__ = ["Case", "Finding", "Verdict", "case_named", "styles_case", "verify"]
