"""Makes the models that several rooms' tests share importable, whatever the import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
