"""The page of a rule, as `meshscope rules CODE` prints it and `docs/rules` holds it."""

import inspect

from meshscope.diagnose.rule import HEADINGS, SUBJECTS, Rule, describe, split_page


def describe_severities(rule: type[Rule]) -> str:
    """`medium`, `low to critical`."""
    lowest, highest = rule.severities
    return lowest.word if lowest is highest else f"{lowest.word} to {highest.word}"


def name_subject(rule: type[Rule]) -> str:
    """What the letters of its code stand for."""
    return SUBJECTS.get(rule.code[:-3], f"{rule.code[:-3]}, of others")


def list_parts(rule: type[Rule]) -> dict[str, str]:
    """Heading to text; rules of others need no headings."""
    try:
        return split_page(rule)
    except ValueError:
        return {HEADINGS[0]: inspect.cleandoc(rule.__doc__ or "")}


def render_page(rule: type[Rule]) -> str:
    """Markdown, from the docstring; ends with a newline."""
    lines = [
        f"# {rule.code} {rule.name}",
        "",
        describe(rule),
        "",
        f"Subject: {name_subject(rule)}. Severity: {describe_severities(rule)}.",
        "",
    ]
    for heading, text in list_parts(rule).items():
        lines += [f"## {heading}", "", text, ""]
    if rule.thresholds:
        lines += ["## Thresholds", "", "| name | default | meaning |", "|---|---|---|"]
        lines += [f"| `{t.name}` | {t.default:g} | {t.meaning} |" for t in rule.thresholds]
        lines += [""]
    if rule.is_pattern:
        lines += ["Low if a finding that names a cause accounts for half of the same loss.", ""]
    return "\n".join(lines[:-1]) + "\n"
