"""Starting ranks: Gloo ranks on this machine, or a process group from the environment that `torchrun` sets."""

from autopar.forking import keep_forkable

from .ending import OTHERS_STAY
from .environment import init_alone, init_from_environment, require_cuda
from .lives import Lives
from .rank import begin_step, end_steps, in_steps, let_wait
from .ranks import run_ranks

__all__ = [
    "OTHERS_STAY", "Lives", "begin_step", "end_steps", "in_steps", "init_alone", "init_from_environment", "let_wait", "require_cuda",
    "run_ranks",
]  # fmt: skip

keep_forkable()
