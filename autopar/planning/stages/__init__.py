"""Pipeline stages: a solution of the whole model cut into stretches of operators.

In: solutions on one or several groups of devices. Out: the cuts and the schedule of the fastest
pipeline that fits the memory.
"""

from .staged_program import StagedProgram, best_pipeline

__all__ = ["StagedProgram", "best_pipeline"]
