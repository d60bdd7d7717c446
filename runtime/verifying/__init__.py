"""Checks of other projects' shardings: executed on ranks, every operator against the whole."""

from .case import Case, case_named, made_case, styles_case
from .operator_watch import Finding
from .verdict import Verdict, verify

__all__ = ["Case", "Finding", "Verdict", "case_named", "made_case", "styles_case", "verify"]
