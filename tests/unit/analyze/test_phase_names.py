"""Numbered phases are one, and a report of them does not grow with the square of steps."""

import json

import meshscope
from builders import MS, make_writer, put_span, put_step
from meshscope.analyze.rank.phase_names import MAX_PHASES, OTHER_PHASES, join_phase_names
from meshscope.store.schema import BUILTIN_NAMES


def test_few_names_stay_as_they_are():
    names = {100 + i: f"step {i}" for i in range(MAX_PHASES)}
    assert join_phase_names(list(names), names) == list(names.values())


def test_names_that_differ_in_their_numbers_are_one():
    names = {100 + i: f"epoch {i} step {2 * i}" for i in range(MAX_PHASES + 1)}
    own = {name_id: text for text, name_id in BUILTIN_NAMES.items()}
    found = join_phase_names([*own, *names], {**own, **names})
    assert found == [*own.values(), *["epoch # step #"] * len(names)]


def test_names_beyond_the_limit_are_others():
    names = {100 + i: f"{chr(65 + i // 26)}{chr(65 + i % 26)}" for i in range(600)}
    found = join_phase_names(list(names), names)
    assert len(set(found)) == MAX_PHASES
    assert found[: MAX_PHASES - 1] == list(names.values())[: MAX_PHASES - 1]
    assert set(found[MAX_PHASES - 1 :]) == {OTHER_PHASES}


def test_a_report_counts_numbered_phases_as_one(tmp_path):
    writer = make_writer(tmp_path / "run")
    for step in range(300):
        put_step(writer, step, 100 * MS * step, 100 * MS * (step + 1))
        put_span(writer, f"step {step}", 100 * MS * step + MS, 50 * MS)
    writer.close()
    text = meshscope.study(tmp_path / "run").report().to_json()
    assert "step #" in text
    assert "step 7" not in json.dumps(json.loads(text))
