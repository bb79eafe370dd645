"""`python -m pytest tests/frameworks/guest_programs.py`: programs of a guest, judged as the others.

Not a part of `make test-frameworks`: they would double its time.
"""

from pathlib import Path

import pytest
from judge import judge
from kinds import GUESTS, Kind
from launching import run_both


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", GUESTS, ids=lambda kind: kind.name)
def test_a_guests_program_is_recorded_as_its_own_timers_say(kind: Kind, tmp_path: Path) -> None:
    cells = judge(kind, *run_both(kind, tmp_path / "0"))
    assert {question: cell.text for question, cell in cells.items() if not cell.is_good} == {}
