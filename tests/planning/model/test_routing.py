"""Routings of experts that are stated in words and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.planning.model.routing import Routing, read_routing


def test_words_and_files(tmp_path: Path) -> None:
    assert read_routing("even") == Routing()
    assert read_routing("worst").kind == "worst"
    file = tmp_path / "counts.json"
    file.write_text('{"counts": [1, 2, 3]}')
    assert read_routing(file) == Routing(kind="counts", counts=((1, 2, 3),))
    file.write_text('{"counts": [[1, 2], [0, 3]]}')
    assert read_routing(str(file)).counts == ((1, 2), (0, 3))


BAD = [
    ("[1, 2]", "holds no JSON object"),
    ("{", "cannot be read as a routing"),
    ("{}", "no routing: counts: Field required"),
    ('{"counts": []}', "no routing: counts: "),
    ('{"counts": [[]]}', "no routing: counts.0: "),
    ('{"counts": [1, -1]}', "no routing: counts.0.1: "),
    ('{"counts": [1, 2.5]}', "no routing: counts.0.1: "),
    ('{"counts": [1, true]}', "no routing: counts.0.1: "),
    ('{"counts": [1, "2"]}', "no routing: counts.0.1: "),
    ('{"counts": [[1, 2], 3]}', "no routing: counts.1: "),
    ('{"counts": [1e400]}', "no routing: counts.0.0: "),
    (json.dumps({"counts": [2**60]}), "no routing: counts.0.0: "),
    ('{"counts": [[1, 2], [0, 0]]}', "counts.1: no expert has a row"),
    ('{"counts": [1], "more": 2}', "no routing: more: Extra inputs"),
    (json.dumps({"counts": [[1]] * 5000}), "no routing: counts: "),
    ("{" + '"a":[' * 50_000, "cannot be read as a routing"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_files_are_refused_by_the_place_of_their_fault(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_routing(file)


def test_a_word_that_is_no_file_is_refused() -> None:
    with pytest.raises(UsageError, match="uneven: cannot be read"):
        read_routing("uneven")
