"""Operators as functions.

An operator's kind and attributes come in, a callable and its arguments go out.
"""

from .functions import arguments_of, function_of
from .local_call import Function, LocalCall, LocalOperator
from .registry import LocalForm, form_of, register

__all__ = [
    "Function",
    "LocalCall",
    "LocalForm",
    "LocalOperator",
    "arguments_of",
    "form_of",
    "function_of",
    "register",
]
