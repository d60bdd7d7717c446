"""Backward passes on a thread of their own, as on CUDA, where autograd has one for each device.

On CPUs autograd runs nodes on the caller's thread. Here a pass of the main thread runs on another,
with the state that autograd carries to its threads: modes of dispatch, and the objects in torch's
own thread-local storage.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

from autopar.runtime.ranks.current_action import CARRIED
from autopar.runtime.torch_versions import stash

from .progress import AUTOGRAD

_plain = torch.autograd.graph._engine_run_backward
_Answers = queue.SimpleQueue[tuple[Any, BaseException | None]]
_CALLS: queue.SimpleQueue[tuple[Callable[[], Any], _Answers]] = queue.SimpleQueue()


def _serve() -> None:
    while True:
        call, answers = _CALLS.get()
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))
        # The thread lives on: it must not hold the tensors of the last pass.
        del call, answers


def _carried(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with this thread's state."""
    private: Any = _python_dispatch
    modes = private._get_current_dispatch_mode_stack()
    known = torch._C._is_key_in_tls(CARRIED)
    carried = torch._C._get_obj_in_tls(CARRIED) if known else None

    def run() -> Any:
        if known:
            stash(CARRIED, carried)
        with contextlib.ExitStack() as stack:
            for mode in modes:
                # Entering a mode would begin it once more; its owner has done so.
                private._push_mode(mode)
                stack.callback(private._pop_mode)
            return call()

    return run


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    # Passes inside a pass stay on its thread, as those of a device do.
    if threading.current_thread() is not threading.main_thread():
        return _plain(*args, **kwargs)
    answers: _Answers = queue.SimpleQueue()
    _CALLS.put((_carried(lambda: _plain(*args, **kwargs)), answers))
    result, error = answers.get()
    if error is not None:
        raise error
    return result


def run_backward_on_a_thread() -> None:
    """Let the backward passes of this process's main thread run on another from now on."""
    threading.Thread(target=_serve, name=AUTOGRAD, daemon=True).start()
    for module in (torch.autograd.graph, torch.autograd):
        vars(module)["_engine_run_backward"] = _run_backward
