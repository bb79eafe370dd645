"""The rules by which `make house` counts."""

import pytest
from house import Source, print_table

SOURCE = {
    "core/values.py": """
from dataclasses import dataclass
from typing import NamedTuple
import msgspec

LIMIT = 3
_PRIVATE = 4
Int64s = list[int]

@dataclass(frozen=True)
class Point:
    x: int
    @dataclass
    class Inner: ...

class Pair(NamedTuple): ...
class Wire(msgspec.Struct): ...
class Plain: ...

def find(x):
    local = 1
    if isinstance(x, Unavailable) or isinstance(x, int | Unavailable | Absent): ...
    return isinstance(x, UnavailableToo)
""",
    "report/sections/steps.py": "import json\nTEXT = json.dumps({})\n",
    "report/sections/__init__.py": "",
    "store/write.py": "import json\nTEXT: str = json.dumps({})\n",
}


@pytest.fixture
def source(tmp_path):
    for name, text in SOURCE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Source.read(tmp_path)


def test_names_and_types_are_counted_by_what_they_are(source):
    # LIMIT, Int64s, Point, Pair, Wire, Plain, find, and TEXT twice.
    assert source.count_public_names() == 9
    assert source.count_value_types() == 4
    assert source.count_aliases() == 1
    assert (source.count_checks("Unavailable"), source.count_checks("Absent")) == (2, 1)


def test_json_counts_where_documents_are_made(source):
    assert source.list_encoders() == ["report/sections/steps.py"]


def test_sizes_name_the_module_or_folder(source):
    assert source.find_longest() == "23 (core/values.py)"
    assert source.find_fullest_folder() == "2 (report/sections)"
    assert source.find_smallest("report/sections") == "2 lines (steps.py)"
    assert source.find_smallest("report/render") == "n/a: no report/render"
    assert source.count_lines() == 27


def test_the_table_is_plain_text(capsys):
    print_table([("lines", "9", "12 (a.py)", "≤ 5")])
    assert capsys.readouterr().out.splitlines() == [
        "measure  before  now        goal",
        "lines    9       12 (a.py)  ≤ 5",
    ]
