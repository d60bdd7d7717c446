"""The page of types is what its command makes of the tables of the tests."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")


def test_the_page_is_what_the_command_makes() -> None:
    from tests.end_to_end.types_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.end_to_end.types_page"


def test_every_type_is_one_that_transformers_knows() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.end_to_end.types_page import runs

    assert {kind.partition(",")[0] for kind in runs()} <= set(CONFIG_MAPPING)
