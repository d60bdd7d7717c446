"""Forked ranks look up no name: another thread of the parent may hold glibc's lock of that, which
stays locked in a fork.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ONE_PROCESS_LOOKS_UP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Every process but one waits for ever, as in a fork that has inherited the lock. */
static void *asked(const char *name) {
  const char *owner = getenv("OWNER_OF_RESOLVER");
  if (owner != NULL && getpid() != atoi(owner)) for (;;) pause();
  if (owner != NULL) fprintf(stderr, "%s looked up\\n", name);
  return dlsym(RTLD_NEXT, name);
}

int getnameinfo(const struct sockaddr *address, socklen_t length, char *host, socklen_t hosts,
                char *service, socklen_t services, int flags) {
  int (*real)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int) =
      asked("getnameinfo");
  return real(address, length, host, hosts, service, services, flags);
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **results) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
      asked("getaddrinfo");
  return real(name, service, hints, results);
}
"""
RUNS_RANKS = """
import os
import torch
import torch.distributed as dist
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.process_groups import message_group

def work():
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.all_reduce(value, group=message_group(0, 1))
    return float(value)

os.environ["OWNER_OF_RESOLVER"] = str(os.getpid())
for backend in ("gloo", "strict"):
    os.environ["AUTOPAR_BACKEND"] = backend
    print(run_ranks(work, 2, timeout=30))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux")
def test_forked_ranks_look_up_no_name(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "resolver.c"
    source.write_text(ONE_PROCESS_LOOKS_UP, encoding="utf-8")
    library = tmp_path / "resolver.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", RUNS_RANKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "[4.0, 4.0]\n" * 2, done.stderr
    # The stand-in was called, in the parent.
    assert "getnameinfo looked up" in done.stderr
