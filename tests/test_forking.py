"""Forked processes: how many there may be, their answers, and their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest

from autopar import forking as module
from autopar.errors import UsageError
from autopar.forking import Forked, Gone, cores, processes


def forked(answer: Any, *others: Forked[Any, Any]) -> Forked[Any, Any]:
    return Forked(lambda: None, answer, others)


def test_the_number_is_that_of_the_cores_or_the_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes(None) == cores() and processes(3) == 3
    # All ranks of a machine may plan at the same time.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert processes(None) == 1
    with pytest.raises(UsageError, match="jobs is 0, it must be at least 1"):
        processes(0)


def test_who_may_have_no_children_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with multiprocessing.get_context("fork").Pool(1) as daemons:
        assert daemons.apply(processes, (3,)) == 1
    process = forked(lambda jobs: processes(jobs))
    process.post(3)
    assert process.receive() == 1
    process.end()
    monkeypatch.setattr(module, "FORKS", False)
    assert processes(3) == 1


def test_answers_come_in_the_order_of_the_questions() -> None:
    first = forked(lambda question: (question, os.getpid()))
    second = forked(lambda question: -question, first)
    for question in (1, 2, 3):
        first.post(question)
        second.post(question)
    assert [first.receive()[0] for _ in range(3)] == [1, 2, 3]
    assert [second.receive() for _ in range(3)] == [-1, -2, -3]
    assert first.waiting == 0 and not first.has_answered
    # A later process holds no end of an earlier one's, so that each ends by itself.
    first.end()
    second.post(4)
    assert second.receive() == -4
    second.end()
    assert not first.process.is_alive() and not second.process.is_alive()


def test_a_process_that_is_gone_says_so() -> None:
    process = forked(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    process.post(1)
    with pytest.raises(Gone):
        process.receive()
    process.end()


def test_a_process_ends_with_its_parent() -> None:
    ours, theirs = multiprocessing.Pipe()

    def parent() -> None:
        # Nobody ends the child: it reads that its parent is gone.
        child = forked(lambda _: os.getpid())
        child.post(0)
        theirs.send(child.receive())
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    theirs.close()
    assert ours.recv() != process.pid
    process.join()
    # The pipe is closed once no process holds its other end, the child being the last one.
    with pytest.raises(EOFError):
        ours.recv()


def test_ctrl_c_is_the_parents(capfd: pytest.CaptureFixture[str]) -> None:
    process = forked(lambda question: question)
    assert process.process.pid is not None
    os.kill(process.process.pid, signal.SIGINT)
    process.post(1)
    assert process.receive() == 1
    process.end()
    assert capfd.readouterr().err == ""
