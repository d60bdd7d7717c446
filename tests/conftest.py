"""Settings of all tests: examples of property-based tests and the width of printed text are the
same in every run.
"""

import os
import re
from collections.abc import Generator

import pytest
from hypothesis import settings

from autopar.sharding.rules import RULES
from tests import long_tests

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
os.environ.pop("COLUMNS", None)
# Answers of other runs are not remembered (`autopar.remembered`).
os.environ["AUTOPAR_CACHE"] = ""
# Most tests compare with one device themselves; those of proofs and checks ask for them.
os.environ["AUTOPAR_CHECKS"] = "off"


@pytest.fixture(autouse=True)
def rules_stay() -> Generator[None, None, None]:
    """Fail a test that leaves a sharding rule behind, or takes one away, for the tests after it."""
    before = set(RULES)
    yield
    assert set(RULES) == before


REFUSED = re.compile(r"torch 2\.1[12]\.\S+ holds no parameter that lies as \[.*?\]")
"""The refusal of a plan by an old torch (`autopar.runtime.torch_versions`)."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test whose plan is refused for the version of torch."""
    report = yield
    if call.excinfo is not None and (refused := REFUSED.search(str(call.excinfo.value))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, refused[0])
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the backend of forked ranks, and what is done with long tests."""
    parser.addoption(
        "--strict-backend", action="store_true", help="fork ranks that are held to NCCL's rules"
    )
    parser.addoption(
        "--part", type=int, help=f"run one of {long_tests.PARTS} parts of the tests that are chosen"
    )
    parser.addoption(
        "--record-long", action="store_true", help=f"write {long_tests.PATH.name} anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the backend for all ranks that tests fork."""
    if config.getoption("--strict-backend"):
        # Tests of planning run without torch, which these modules import.
        from autopar.runtime.launch.rank_process import BACKEND
        from autopar.runtime.strict_backend import NAME

        os.environ[BACKEND] = NAME
    # Only the process that hears of all tests writes; workers have an input from it.
    if config.getoption("--record-long") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(long_tests.Recorder())


# Before pytest itself looks at the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark long tests, take a part of all; leave out tests of Gloo on the strict backend."""
    long_tests.mark(items)
    part = config.getoption("--part")
    if part is not None:
        wanted = part % long_tests.PARTS
        others = [item for item in items if long_tests.part_of(item.nodeid) != wanted]
        items[:] = [item for item in items if long_tests.part_of(item.nodeid) == wanted]
        config.hook.pytest_deselected(items=others)
    if config.getoption("--strict-backend"):
        for item in items:
            if item.get_closest_marker("gloo"):
                item.add_marker(pytest.mark.skip(reason="a test of Gloo itself"))
