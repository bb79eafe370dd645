import json

import pytest
from click.testing import CliRunner

from meshscope.cli import main
from meshscope.diagnose.registry import RULES


def invoke(*arguments):
    return CliRunner().invoke(main, ["rules", *arguments])


def test_every_rule_has_a_line():
    result = invoke()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(RULES)


@pytest.mark.parametrize("name", ["HE002", "he002", "rank-stopped"])
def test_one_rule_has_its_page(name):
    result = invoke(name)
    assert result.exit_code == 0
    assert result.stdout.startswith("# HE002 rank-stopped\n")
    assert "## When it is wrong\n" in result.stdout


def test_json_has_pages_and_thresholds():
    rules = json.loads(invoke("--json").stdout)["rules"]
    assert [rule["code"] for rule in rules] == sorted(RULES)
    one = json.loads(invoke("TI002", "--json").stdout)
    assert (one.pop("document"), one.pop("document_version")) == ("meshscope-rule", 1)
    assert one == next(rule for rule in rules if rule["code"] == "TI002")
    assert one["thresholds"][0]["name"] == "periodic_min_lost_ratio"


def test_counterparts_are_listed():
    text = invoke("--counterparts").stdout
    assert len(text.splitlines()) == 20
    assert "DIST.STRAGGLER" in text
    listed = json.loads(invoke("--counterparts", "--json").stdout)["counterparts"]
    assert {one["tool"] for one in listed} == {"pytscope", "torsh"}


def test_an_unknown_code_is_a_usage_error_with_the_nearest():
    result = invoke("HE0O2")
    assert result.exit_code == 2
    assert result.stderr == "meshscope: there is no rule 'HE0O2'; the nearest is HE002\n"
    far = "meshscope: there is no rule 'slowness'; `meshscope rules` lists all\n"
    assert invoke("slowness").stderr == far
    assert invoke("HE002", "--counterparts").exit_code == 2
