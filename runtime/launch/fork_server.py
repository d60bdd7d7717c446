"""Ranks for a process that cannot fork them: a server forks a launcher for each call.

The server has the runtime imported and runs nothing itself. It starts with the first call and ends
with this process. Function and arguments reach a launcher pickled: by `cloudpickle` if it is
installed, which handles closures and notebooks, else by `pickle`. Other state of this process
(registered rules, defined operators) is missing there, unless the function's module brings it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

import torch

from autopar.errors import RunError

from .forked_ranks import fork_ranks
from .rank_process import die_with
from .termination import ASKED, Ending, end_by_sigterm, on_sigterm

START_UP = 120.0
"""Seconds that a server may take to import torch on a busy machine, beyond the call's timeout."""
_PRELOADED = ("autopar.runtime.run", "autopar.runtime.parallelize")
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from autopar.runtime.launch.fork_server import serve
serve(int(sys.argv[1]))
"""
_REFUSED = (
    "a backward pass has run in this process, so ranks start from another,"
    " to which {name} cannot be handed: {why}; {remedy}"
)
_MOVE = (
    "move what it needs to the top level of a module that can be imported, or install cloudpickle"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """A server of launchers, and the end of the line over which it gets connections."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    owner: int
    """The process that owns the server; a process forked from the owner starts its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """The caller's state that ranks get, as after a fork."""

    directory: str
    environment: dict[str, str]
    path: list[str]
    dtype: torch.dtype
    random: torch.Tensor


_servers: list[_Server] = []


def run_clean(
    function: Callable[..., Any],
    nproc: int,
    args: tuple[Any, ...],
    timeout: float,
    *,
    endless: bool = False,
) -> list[Any]:
    """The results of `function(*args)` on ranks that fork from a process which has run nothing."""
    payload = _pickled(function, args)
    caller, launcher = socket.socketpair()
    try:
        _hand_over(launcher)
    finally:
        launcher.close()
    with Connection(caller.detach()) as connection:
        try:
            connection.send_bytes(pickle.dumps((_scene(), nproc, timeout, endless)))
            connection.send_bytes(payload)
            ending = Ending(list)
            with on_sigterm(lambda: _ask(ending, connection)):
                if not connection.poll(None if endless else timeout + START_UP):
                    raise RunError(f"the ranks did not finish within {timeout:g} s")
            done, answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise RunError("the process that starts the ranks was killed") from None
    if not done and ending.asked:
        end_by_sigterm(answer)
    if not done:
        raise RunError(answer)
    if ending.asked:
        raise SystemExit(0)
    return [pickle.loads(result) for result in answer]


def _ask(ending: Ending, launcher: Connection) -> None:
    """Have the launcher pass SIGTERM on, once."""
    if not ending.asked:
        launcher.send_bytes(ASKED)
    ending.ask()


def _pickler() -> ModuleType:
    """The module that pickles functions: `cloudpickle` if it is installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The pickled function and arguments for a launcher.

    Raises a `RunError` with a remedy if they cannot be pickled.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    pickler = _pickler()
    here = getattr(function, "__module__", "") == "__main__" or "<" in name
    if pickler is pickle and here:
        why = "it is defined inside a function or in the main program"
        raise RunError(_REFUSED.format(name=name, why=why, remedy=_MOVE))
    try:
        payload: bytes = pickler.dumps((function, args))
    except Exception as error:
        remedy = _MOVE if pickler is pickle else "start the ranks before the first backward pass"
        raise RunError(_REFUSED.format(name=name, why=error, remedy=remedy)) from None
    return payload


def _scene() -> _Scene:
    """The state of this process that its ranks get."""
    path = [os.path.abspath(entry) for entry in sys.path]
    default = torch.get_default_dtype()
    state = torch.get_rng_state()
    return _Scene(
        directory=os.getcwd(), environment=dict(os.environ), path=path, dtype=default, random=state
    )


def _hand_over(connection: socket.socket) -> None:
    """Give the server a connection for a new launcher, and this process's output.

    A server that has died is replaced.
    """
    for _ in range(2):
        try:
            socket.send_fds(_server().line, [b"+"], [connection.fileno(), 1, 2])
            return
        except (BrokenPipeError, ConnectionResetError):
            _stop()
    raise RunError("the process that starts the ranks cannot be started")


def _server() -> _Server:
    """The server of this process, started if there is none."""
    mine = [server for server in _servers if server.owner == os.getpid()]
    # A fork inherits the list, but not the right to use its parent's server.
    if not mine:
        ours, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), path]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        mine = [_Server(process=process, line=ours, owner=os.getpid())]
        _servers[:] = mine
        atexit.register(_stop)
    return mine[0]


def _stop() -> None:
    """Let the server of this process end, by closing its line."""
    for server in _servers:
        server.line.close()
        if server.owner == os.getpid():
            server.process.wait()
    _servers.clear()


def serve(line: int) -> None:
    """Fork a launcher for each connection that comes over the line, until the line ends."""
    with socket.socket(fileno=line) as requests:
        # Ctrl-C reaches all processes of the terminal; the caller decides what ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in _PRELOADED:
            importlib.import_module(name)
        # The kernel buries the launchers.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        # A launcher dies with this process, by its id, since a launcher may outlive the caller's
        # connection.
        server = os.getpid()
        while True:
            word, ends, _, _ = socket.recv_fds(requests, 1, 3)
            if not word:
                return
            if os.fork() == 0:
                requests.close()
                _launch(server, *ends)
            for end in ends:
                os.close(end)


def _launch(server: int, connection: int, output: int, errors: int) -> NoReturn:
    """Fork the ranks of one call and send back what they return, then end."""
    # The launcher waits for its ranks, which it could not do if the kernel buried them.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(server)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    with Connection(connection) as caller:
        answer: tuple[bool, Any]
        try:
            answer = True, _call(caller)
        except RunError as error:
            answer = False, str(error)
        except BaseException:
            trace = traceback.format_exc()
            text = f"the function cannot be called in the process that starts the ranks:\n{trace}"
            answer = False, text
        with contextlib.suppress(BrokenPipeError):
            caller.send_bytes(pickle.dumps(answer))
    # A fork has inherited the server's exit handlers, which are not for it to run.
    os._exit(0)


def _call(caller: Connection) -> list[bytes]:
    """Take over the caller's state, and run its function on ranks."""
    scene, nproc, timeout, endless = pickle.loads(caller.recv_bytes())
    assert isinstance(scene, _Scene)
    os.chdir(scene.directory)
    # The server was started earlier, maybe from another folder and environment.
    os.environ.clear()
    os.environ.update(scene.environment)
    sys.path[:] = scene.path
    torch.set_default_dtype(scene.dtype)
    torch.set_rng_state(scene.random)
    with warnings.catch_warnings():
        # Torch's tree specs warn of their own class.
        warnings.simplefilter("ignore", FutureWarning)
        function, args = pickle.loads(caller.recv_bytes())

    def pickled() -> bytes:
        """The function's result as bytes, since launchers and callers share no types."""
        result: bytes = _pickler().dumps(function(*args))
        return result

    return fork_ranks(pickled, nproc, (), timeout, caller, endless=endless)
