"""Galvatron's search for Llama-2-7B: its own script, with the profiles that it ships.

The package of its runtime imports Triton, of which a search has no need: an empty one is put in its
place.
"""

import os
import runpy
import sys
import types

sys.path.insert(0, os.getcwd())
import galvatron.core

root = os.getcwd()
for name in ("runtime", "profiler"):
    empty = types.ModuleType(f"{galvatron.core.__name__}.{name}")
    empty.__path__ = [os.path.join(root, "galvatron", "core", name)]
    sys.modules[empty.__name__] = empty
os.chdir("galvatron/models/gpt")
sys.argv = [
    "search_dist.py",
    "scripts/search_dist.yaml",
    "SEQ_LENGTH=2048",
    "search_engine.profiling_info.time_profile_mode=static",
]
runpy.run_path("search_dist.py", run_name="__main__")
