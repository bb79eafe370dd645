"""`meshscope rules`: what the diagnosis looks for, rule by rule."""

import difflib
from collections.abc import Mapping
from pathlib import Path

import click

from meshscope.cli.terminal_screen import show_document
from meshscope.diagnose.counterparts import COUNTERPARTS
from meshscope.diagnose.foreign_rules import load_rules
from meshscope.diagnose.rule import Rule, describe
from meshscope.diagnose.rule_page import describe_severities, render_page
from meshscope.errors import UsageError
from meshscope.report import listings
from meshscope.report.format import align


@click.command("rules", short_help="List the rules of the diagnosis.")
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option(
    "--counterparts",
    is_flag=True,
    help="List the rules of the monitors this one came from, and what replaces them.",
)
@click.option(
    "--rules",
    "rules_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Python file with rules of your own, which is run; may be given several times.",
)
def command(
    *, code: str | None, as_json: bool, counterparts: bool, rules_files: tuple[Path, ...]
) -> None:
    """Lists all rules, or prints the page of CODE: what it finds, how, and when it is wrong."""
    if counterparts and code is not None:
        raise UsageError("--counterparts lists all rules; it takes no CODE")
    loaded = load_rules(rules_files)
    for failure in loaded.failures:
        click.echo(
            f"meshscope: {failure.what} not loaded: {failure.error} ({failure.place})", err=True
        )
    known = loaded.rules
    rules = [known[one] for one in sorted(known)] if code is None else [_find_rule(code, known)]
    if as_json:
        _show_json(rules, is_one=code is not None, counterparts=counterparts)
    elif counterparts:
        click.echo(_list_counterparts(), nl=False)
    else:
        click.echo(_list_rules(rules) if code is None else render_page(rules[0]), nl=False)


def _show_json(rules: list[type[Rule]], *, is_one: bool, counterparts: bool) -> None:
    if counterparts:
        document = listings.CounterpartsDocument(counterparts=COUNTERPARTS)
        show_document(listings.COUNTERPARTS, document)
    elif is_one:
        show_document(listings.RULE, listings.describe_rule(rules[0]))
    else:
        facts = tuple(listings.describe_rule(rule) for rule in rules)
        show_document(listings.RULES, listings.RulesDocument(rules=facts))


def _find_rule(code: str, rules: Mapping[str, type[Rule]]) -> type[Rule]:
    by_name = {rule.name: rule for rule in rules.values()}
    rule = rules.get(code.upper()) or by_name.get(code.lower())
    if rule is None:
        nearest = difflib.get_close_matches(code.upper(), rules, n=1)
        hint = f"the nearest is {nearest[0]}" if nearest else "`meshscope rules` lists all"
        raise UsageError(f"there is no rule {code!r}; {hint}")
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
