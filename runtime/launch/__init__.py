"""Starting ranks: Gloo ranks on this machine, or a process group from a launcher's environment."""

from autopar.forking import keep_forkable

from .backends import default_backend, require_backend
from .devices import device_of_group
from .environment import init_alone, init_from_environment
from .failing_ranks import Lives
from .launchers import LaunchedRank, launched, launched_first
from .local_ranks import forked_on, run_ranks
from .rank_process import LATE, begin_step, end_steps, in_steps
from .termination import OTHERS_STAY

__all__ = [
    "LATE",
    "OTHERS_STAY",
    "LaunchedRank",
    "Lives",
    "begin_step",
    "default_backend",
    "device_of_group",
    "end_steps",
    "forked_on",
    "in_steps",
    "init_alone",
    "init_from_environment",
    "launched",
    "launched_first",
    "require_backend",
    "run_ranks",
]

keep_forkable()
