"""Settings of all tests: examples of property-based tests and the width of printed text are the
same in every run.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
os.environ.pop("COLUMNS", None)
