"""The published JSON Schema of the plan file is the one that the code checks by; `UPDATE_GOLDEN=1` rewrites it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autopar.plan import plan_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "plan.schema.json"


def test_the_published_schema_is_current() -> None:
    text = json.dumps(plan_schema(), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        PUBLISHED.write_text(text, encoding="utf-8")
    assert PUBLISHED.read_text(encoding="utf-8") == text
