"""The planned model as an ordinary `nn.Module`.

A plan and values come in, a module that calls the engine goes out.
"""

from .parallel_module import ModuleOptions, ParallelModule

__all__ = ["ModuleOptions", "ParallelModule"]
