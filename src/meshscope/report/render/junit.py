"""A comparison as JUnit XML, which most CI systems show as tests.

Two tests: the step period and the loss. One that was not asked for passes and says what was found;
one that is inconclusive is skipped, with the reason. Characters XML cannot hold are taken out.
"""

import re
from xml.etree import ElementTree

from meshscope.analyze.compare.compare import Verdict
from meshscope.core.unavailable import known
from meshscope.report.sections.compare import Compared, tell_loss, tell_test, tell_verdict

_CLASS_NAME = "meshscope.compare"
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(compared: Compared) -> str:
    suite = ElementTree.Element("testsuite", name=_clean(f"{compared.a} against {compared.b}"))
    cases = [_judge_period(compared), _judge_loss(compared)]
    suite.extend(cases)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    root = ElementTree.Element("testsuites", name="meshscope compare")
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _judge_period(compared: Compared) -> ElementTree.Element:
    text = tell_verdict(compared)
    detail = f"{text}\n{tell_test(compared.comparison.period)}"
    if compared.verdict is Verdict.SLOWER:
        return _make_case("step period", detail, "failure", text)
    if compared.verdict is Verdict.INCONCLUSIVE:
        return _make_case("step period", detail, "skipped", text)
    return _make_case("step period", detail)


def _judge_loss(compared: Compared) -> ElementTree.Element:
    loss = compared.comparison.loss
    text = tell_loss(loss)
    if compared.is_loss_failure:
        return _make_case("loss", text, "failure", text)
    if known(loss) is None:
        return _make_case("loss", text, "skipped", text)
    return _make_case("loss", text)


def _make_case(
    name: str, detail: str, outcome: str | None = None, message: str = ""
) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=_CLASS_NAME, name=name, time="0")
    if outcome is not None:
        ElementTree.SubElement(case, outcome, message=_clean(message)).text = _clean(detail)
    ElementTree.SubElement(case, "system-out").text = _clean(detail)
    return case


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)
