"""Checks of other projects' shardings against the whole model, executed on ranks operator by operator."""

from .case import Case, case_named, styles_case
from .run import Verdict, verify
from .watching import Finding

__all__ = ["Case", "Finding", "Verdict", "case_named", "styles_case", "verify"]
