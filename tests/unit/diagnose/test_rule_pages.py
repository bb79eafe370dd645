import pytest
from diagnosed import make_rule

from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import HEADINGS, describe, split_page
from meshscope.diagnose.rule_page import render_page

PAGE = """One sentence
over two lines.

What it finds: this.

Why it matters: that,
  - with a list.

How it is measured: counted.
What to change: nothing.
When it is wrong: never.
"""


def rule_with(page):
    rule = make_rule("TI999", lambda context: [])
    rule.__doc__ = page
    return rule


def test_a_docstring_is_split_at_its_headings():
    rule = rule_with(PAGE)
    assert describe(rule) == "One sentence over two lines."
    assert split_page(rule) == {
        "What it finds": "This.",
        "Why it matters": "That,\n  - with a list.",
        "How it is measured": "Counted.",
        "What to change": "Nothing.",
        "When it is wrong": "Never.",
    }


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_missing_or_empty_heading_is_named(heading):
    without = PAGE.replace(f"{heading}:", "Something else:")
    with pytest.raises(ValueError, match=r"Given \(TI999\) has the headings"):
        split_page(rule_with(without))
    lines = [
        f"{heading}:" if line.startswith(heading) else line
        for line in PAGE.splitlines()
        if "list" not in line
    ]
    with pytest.raises(ValueError, match="each followed by text"):
        split_page(rule_with("\n".join(lines)))


def test_headings_out_of_order_are_refused():
    swapped = PAGE.replace("What it finds:", "A:").replace("Why it matters:", "What it finds:")
    with pytest.raises(ValueError, match="headings"):
        split_page(rule_with(swapped.replace("A:", "Why it matters:")))


def test_a_page_has_everything_a_reader_asks_for():
    page = render_page(RULES["TI002"])
    assert page.startswith("# TI002 periodic-slow-steps\n\nSteps at a fixed interval")
    assert "Subject: step time. Severity: low to critical." in page
    assert "| `periodic_min_lost_ratio` | 0.02 |" in page
    assert page.endswith("accounts for half of the same loss.\n")
