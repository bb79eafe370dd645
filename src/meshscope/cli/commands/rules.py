"""`meshscope rules`: what the diagnosis looks for, rule by rule."""

import difflib

import click
import msgspec

from meshscope.diagnose.counterparts import COUNTERPARTS, Counterpart
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import Rule, describe, split_page
from meshscope.diagnose.rule_page import describe_severities, name_subject, render_page
from meshscope.errors import UsageError
from meshscope.report.format import align


@click.command("rules", short_help="List what the diagnosis looks for.")
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON array, or one rule's object.")
@click.option(
    "--counterparts",
    is_flag=True,
    help="List the rules of the monitors this one came from, and what takes their place.",
)
def command(*, code: str | None, as_json: bool, counterparts: bool) -> None:
    """Lists all rules, or prints the page of CODE: what it finds, how, and when it is wrong."""
    if counterparts:
        if code is not None:
            raise UsageError("--counterparts lists all rules; it takes no CODE")
        click.echo(_encode(COUNTERPARTS) if as_json else _list_counterparts(), nl=False)
        return
    if code is not None:
        rule = _find_rule(code)
        click.echo(_encode(_describe_rule(rule)) if as_json else render_page(rule), nl=False)
        return
    rules = [RULES[known] for known in sorted(RULES)]
    text = _encode([_describe_rule(rule) for rule in rules]) if as_json else _list_rules(rules)
    click.echo(text, nl=False)


def _find_rule(code: str) -> type[Rule]:
    by_name = {rule.name: rule for rule in RULES.values()}
    rule = RULES.get(code.upper()) or by_name.get(code.lower())
    if rule is None:
        nearest = difflib.get_close_matches(code.upper(), RULES, n=1, cutoff=0.0)
        raise UsageError(f"there is no rule {code!r}; the nearest is {nearest[0]}")
    return rule


def _list_rules(rules: list[type[Rule]]) -> str:
    return align(
        [(rule.code, rule.name, describe_severities(rule), describe(rule)) for rule in rules]
    )


def _list_counterparts() -> str:
    return align(
        [
            (one.tool, one.rule, f"{', '.join(one.codes) or 'none'}  {one.difference}")
            for one in COUNTERPARTS
        ]
    )


def _describe_rule(rule: type[Rule]) -> dict[str, object]:
    return {
        "code": rule.code,
        "name": rule.name,
        "subject": name_subject(rule),
        "lowest_severity": rule.severities[0].word,
        "highest_severity": rule.severities[1].word,
        "what": describe(rule),
        "page": split_page(rule),
        "thresholds": [
            {"name": t.name, "default": t.default, "meaning": t.meaning} for t in rule.thresholds
        ],
        "symptom_of": sorted(rule.symptom_of),
    }


def _encode(value: object) -> str:
    def to_fields(one: object) -> object:
        if isinstance(one, Counterpart):
            return {
                "tool": one.tool,
                "rule": one.rule,
                "codes": list(one.codes),
                "difference": one.difference,
            }
        raise NotImplementedError(type(one).__name__)

    return (
        msgspec.json.format(msgspec.json.encode(value, enc_hook=to_fields), indent=2).decode()
        + "\n"
    )
