"""Rules of others: the example of the documentation, and everything that may be wrong with one."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from diagnosed import context_of

from builders import MS, make_run
from made_programs import ProgramRun, reduce, work
from meshscope.cli import main
from meshscope.core.layout import Layout
from meshscope.diagnose.foreign_rules import GROUP, load_rules
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from meshscope.errors import UsageError
from meshscope.report.run_study import study

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_rules.py"
HEAD = """
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rule import Rule
from meshscope.simulate.what_if import Edit
import numpy as np

class Mine(Rule):
    "It is there."
    code = "ACME001"
    name = "it-is-there"

    def find(self, context):
"""
FINDING = """
        yield Finding(code="ACME001", title="here", severity=Severity.HIGH, summary="Here.",
                      change="Go.", gain=Unavailable("free"))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), layout=Layout(dp=2), num_steps=12)


def write(folder: Path, text: str, name: str = "acme.py") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def report(run: Path, *arguments: object):
    return CliRunner().invoke(main, ["report", str(run), *map(str, arguments)])


def test_the_example_speaks_of_an_unsteady_rank_and_is_silent_without_one(tmp_path):
    def program(rank: int, step: int):
        return [work("forward", 10 * MS), reduce((0, 1), MS)]

    def rough(rank: int, step: int):
        return [work("forward", 90 * MS if step % 4 == 0 else 10 * MS), reduce((0, 1), MS)]

    found = {}
    for name, one in (("calm", program), ("rough", rough)):
        ProgramRun(one, num_ranks=2, num_steps=20).record(tmp_path / name)
        findings = study(tmp_path / name, rules=[EXAMPLE]).findings
        found[name] = [one.title for one in findings if len(one.code) > 5]
    assert found == {"calm": [], "rough": ["the pace of rank 0 is unsteady"]}


def test_its_limit_and_its_page_are_known_to_the_commands(run):
    shown = CliRunner().invoke(main, ["rules", "UNSTEADY001", "--rules", str(EXAMPLE)])
    assert "## When it is wrong" in shown.stdout
    result = report(
        run, "--rules", EXAMPLE, "--threshold", "unsteady_max_spread_factor=0.5", "--explain"
    )
    assert "medium  UNSTEADY001  the pace of rank" in result.stdout


def test_a_finding_of_another_makes_the_exit_code(run, tmp_path):
    file = write(tmp_path, HEAD + FINDING)
    assert report(run, "--rules", file, "--fail-on", "high").exit_code == 7
    assert report(run, "--fail-on", "high").exit_code == 0


@pytest.mark.parametrize(
    ("text", "what", "error"),
    [
        ("x = 1", "rules of acme.py", "TypeError: it defines no class"),
        ("def f(:", "rules of acme.py", "SyntaxError: "),
        ("import sys; sys.exit(3)", "rules of acme.py", "ImportError: it ends the program"),
        (HEAD + "        return 1 / 0", "rule ACME001 of acme.py", "ZeroDivisionError: "),
        (HEAD + "        return [1]", "rule ACME001 of acme.py", "TypeError: it gave int; "),
        (
            HEAD + FINDING.replace("Severity.HIGH", "'high'"),
            "rule ACME001 of acme.py",
            "TypeError: the severity",
        ),
        (
            HEAD + FINDING.replace("change=", "edit=Edit(name='x', work_ns=np.zeros(3)), change="),
            "rule ACME001 of acme.py",
            "TypeError: an edit has work of shape (3,)",
        ),
        (HEAD.replace("ACME001", "ST001") + FINDING, "rule Mine of acme.py", "ValueError: its co"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said_with_its_file_and_loses_nothing(
    run, tmp_path, text, what, error
):
    chosen = load_rules([write(tmp_path, text)])
    context = context_of(run)
    context.study.failures.extend(chosen.failures)
    found = diagnose(context, rules=chosen.rules, sources=chosen.sources).findings
    (failed,) = [one for one in found if one.code == "HE001"]
    assert failed.title == f"{what} failed"
    assert error in failed.summary
    assert len(found) == len(diagnose(context_of(run)).findings) + 1


def test_two_rules_of_one_code_are_one_and_no_file_is_a_usage_error(tmp_path):
    files = [write(tmp_path, HEAD + FINDING, name) for name in ("a.py", "b.py")]
    loaded = load_rules(files)
    assert loaded.sources == {"ACME001": "a.py"}
    assert [one.what for one in loaded.failures] == ["rule Mine of b.py"]
    with pytest.raises(UsageError, match="is no file"):
        load_rules([tmp_path / "c.py"])


def test_an_installed_package_offers_its_rules(monkeypatch, tmp_path):
    write(tmp_path, HEAD + FINDING, "acme_rules.py")
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    write(folder, "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n", "METADATA")
    points = f"[{GROUP}]\nacme = acme_rules\ngone = no_such_module\n"
    write(folder, points, "entry_points.txt")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_rules()
    assert set(loaded.rules) == {*RULES, "ACME001"}
    assert loaded.sources == {"ACME001": "acme (acme_rules)"}
    assert [one.what for one in loaded.failures] == ["rules of acme (no_such_module)"]
