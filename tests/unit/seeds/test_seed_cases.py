"""The list of founding defects is complete: every case has a test that exists, and its page."""

import pytest
from seed_cases import CASES, PAGE, ROOT, function_names_in, render_page


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.defect[:40])
def test_every_case_names_tests_that_exist(case):
    assert case.tests
    for test in case.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), path
        assert name in function_names_in(ROOT / path), test


def test_no_case_is_listed_twice():
    assert len({case.defect for case in CASES}) == len(CASES)


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == render_page(), (
        "run python tests/unit/seeds/seed_cases.py"
    )
