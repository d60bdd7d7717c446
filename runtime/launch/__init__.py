"""Starting ranks: Gloo ranks on this machine, or a process group from `torchrun`'s environment."""

from autopar.forking import keep_forkable

from .environment import init_alone, init_from_environment, require_cuda
from .failing_ranks import Lives
from .local_ranks import forked_on, run_ranks
from .rank_process import begin_step, end_steps, in_steps, let_wait
from .termination import OTHERS_STAY

__all__ = [
    "OTHERS_STAY",
    "Lives",
    "begin_step",
    "end_steps",
    "forked_on",
    "in_steps",
    "init_alone",
    "init_from_environment",
    "let_wait",
    "require_cuda",
    "run_ranks",
]

keep_forkable()
