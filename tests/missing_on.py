"""The modules, calls and signals of Python that macOS and Windows lack, and a process without them.

`python -m tests.missing_on windows WORD ...` runs the command line without them, and without words
imports every module of planning. The packages that autopar needs have builds of their own for these
systems, so they are imported first. Files must be opened with an encoding, since Windows has
another one by default. The lists are those of the "Availability" notes in Python's documentation.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
import time
import warnings
from types import ModuleType

from tests.product_code import MODULES

PACKAGES = "jinja2 networkx numpy onnx pydantic rich.console rich.progress rich.table yaml"
STANDARD = (
    "concurrent.futures ctypes getpass logging multiprocessing.connection pathlib random subprocess"
    " tempfile threading uuid"
)
RUNTIME = (
    "autopar.runtime",
    "autopar.integrations.oneflow",
    "autopar.frontends.torch",
    "autopar.facts",
    "autopar.torch_operators",
)
"""Rooms that need torch: ranks run on Linux."""
WITHOUT_MODULES = {
    "macos": "ossaudiodev spwd",
    "windows": "crypt curses fcntl grp nis ossaudiodev posix pty pwd readline resource spwd syslog"
    " termios tty",
}
WITHOUT_CALLS: dict[str, dict[ModuleType, str]] = {
    "macos": {
        os: "copy_file_range eventfd fdatasync getresgid getresuid memfd_create pidfd_open"
        " posix_fadvise posix_fallocate sched_getaffinity sched_getparam sched_getscheduler"
        " sched_setaffinity sched_setparam setns setresgid setresuid splice unshare O_DIRECT"
        " O_TMPFILE",
        select: "epoll",
        signal: "sigtimedwait sigwaitinfo SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT",
        socket: "AF_ALG AF_NETLINK AF_PACKET AF_VSOCK SO_BINDTODEVICE",
        time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    },
    "windows": {
        os: "chown chroot confstr copy_file_range ctermid eventfd fchdir fchmod fchown fdatasync"
        " fork forkpty fpathconf fstatvfs getegid geteuid getgid getgrouplist getgroups getloadavg"
        " getpgid getpgrp getpriority getresgid getresuid getsid getuid initgroups killpg lchown"
        " lockf major makedev memfd_create minor mkfifo mknod nice openpty pathconf pidfd_open"
        " pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv pwrite pwritev"
        " readv register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setegid"
        " seteuid setgid setgroups setpgid setpriority setsid setuid splice statvfs sync sysconf"
        " tcgetpgrp tcsetpgrp ttyname uname wait wait3 wait4 waitid writev O_CLOEXEC O_DIRECT"
        " O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC SCHED_OTHER",
        select: "epoll poll",
        signal: "alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt"
        " sigpending sigtimedwait sigwait sigwaitinfo SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO"
        " SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG"
        " SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK",
        socket: "AF_NETLINK AF_PACKET AF_UNIX socketpair",
        time: "clock_getres clock_gettime clock_settime pthread_getcpuclockid tzset",
    },
}


def take_away(system: str) -> None:
    """Remove from this process what the system lacks; whoever needs it then fails."""
    for name in f"{STANDARD} {PACKAGES}".split():
        importlib.import_module(name)
    sys.modules.update(dict.fromkeys(("torch", *WITHOUT_MODULES[system].split()), None))  # type: ignore[arg-type]
    for module, names in WITHOUT_CALLS[system].items():
        for name in names.split():
            vars(module).pop(name, None)
    ours = "|".join(("autopar", "costmodel", "search"))
    warnings.filterwarnings("error", category=EncodingWarning, module=ours)


def import_planning() -> None:
    """Import every module of the product outside the runtime."""
    for name in MODULES:
        if not name.startswith(RUNTIME) and not name.endswith("__main__"):
            importlib.import_module(name)


if __name__ == "__main__":
    take_away(sys.argv[1])
    sys.argv = ["autopar", *sys.argv[2:]]
    if len(sys.argv) == 1:
        import_planning()
    else:
        from autopar.cli import main

        main()
