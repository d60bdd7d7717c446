"""The comparison with the planners of others: its measure of a process, and a checkout that stands
in for one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import planners

STAND_IN = {
    "simumax/core/config.py": """
class _Read:
    @staticmethod
    def read_json_file(path): return {}
    @classmethod
    def init_from_dict(cls, actual): return actual
    init_from_config_file = init_from_dict
ModelConfig = StrategyConfig = SystemConfig = _Read
""",
    "simumax/core/perf_llm.py": """
class PerfLLM:
    def configure(self, **given): assert given["strategy_config"]["world_size"] == 8
    def search_best_parallel_strategy(self, **asked):
        print("noise")
        return {"iter_time": f"{asked['global_batch_size'] / 32} s"}
""",
}


def test_cpu_seconds_and_the_last_figure_of_a_process(tmp_path: Path) -> None:
    seconds, actual = planners.run(
        sys.executable,
        "print('STEP 1e-3'); print('STEP 1.5 s'); sum(range(10**6))",
        tmp_path,
        "STEP",
    )
    assert seconds > 0.0 and actual == 1.5


def test_a_planner_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such profile"):
        planners.run(sys.executable, "raise SystemExit('no such profile')", tmp_path, "STEP")


def test_each_rival_runs_beside_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(planners, "SIMUMAX", planners.SIMUMAX[:1])
    monkeypatch.setattr(planners, "OURS", "print('STEP', len({root!r}) * 0 + 0.5)  # {name}")
    (row,) = planners.rows(tmp_path, None, sys.executable)
    assert (row.case, row.rival, row.ours_step_s, row.rival_step_s) == (
        "llama3-8b on 8",
        "simumax",
        0.5,
        2.0,
    )
    assert row.ratio == row.ours_s / row.rival_s > 0.0
