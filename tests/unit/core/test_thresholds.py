import pytest

from meshscope.core.verdict.thresholds import Threshold, Thresholds, choose_thresholds
from meshscope.errors import UsageError

EFFECT = Threshold(name="straggler_min_effect_ratio", default=0.05, meaning="made up")
STEPS = Threshold(name="min_steps", default=10, meaning="made up", minimum=2)
KNOWN = (EFFECT, STEPS)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_hold_until_changed():
    assert Thresholds()[EFFECT] == 0.05
    assert choose_thresholds(KNOWN)[STEPS] == 10


def test_a_file_changes_them_and_the_command_line_goes_over_it(tmp_path):
    file = write(
        tmp_path / "limits.toml",
        "[thresholds]\nstraggler_min_effect_ratio = 0.2\nmin_steps = 5\n[other]\nx = 1\n",
    )
    chosen = choose_thresholds(KNOWN, file=file, assignments=["min_steps = 7"])
    assert (chosen[EFFECT], chosen[STEPS]) == (0.2, 7.0)
    assert dict(chosen.changed) == {"straggler_min_effect_ratio": 0.2, "min_steps": 7.0}


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="no threshold 'min_step'; the nearest is 'min_steps'"):
        choose_thresholds(KNOWN, assignments=["min_step=3"])
    with pytest.raises(UsageError, match="no threshold 'wanted'; `meshscope rules CODE` lists"):
        choose_thresholds(KNOWN, assignments=["wanted=3"])


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    file = write(tmp_path / "limits.toml", '[thresholds]\nmin_steps = "many"\nnone = 1\n')
    with pytest.raises(UsageError) as caught:
        choose_thresholds(KNOWN, file=file, assignments=["straggler_min_effect_ratio", "x=y=z"])
    text = str(caught.value)
    assert "'straggler_min_effect_ratio' is not NAME=VALUE" in text
    assert "min_steps is 'many'; it takes a number (default 10)" in text
    assert "no threshold 'none'" in text
    assert "no threshold 'x'" in text


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1", "", "true", "1e999"])
def test_values_that_make_no_sense_are_refused(value):
    with pytest.raises(UsageError, match="min_steps is"):
        choose_thresholds(KNOWN, assignments=[f"min_steps={value}"])


def test_a_boolean_in_a_file_is_no_number(tmp_path):
    file = write(tmp_path / "limits.toml", "[thresholds]\nmin_steps = true\n")
    with pytest.raises(UsageError, match="takes a number"):
        choose_thresholds(KNOWN, file=file)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[thresholds", "is not TOML"),
        ("x = 1\n", r"has no table \[thresholds\]"),
        ("thresholds = 3\n", r"has no table \[thresholds\]"),
    ],
)
def test_a_file_that_is_not_one_is_refused(tmp_path, text, complaint):
    with pytest.raises(UsageError, match=complaint):
        choose_thresholds(KNOWN, file=write(tmp_path / "limits.toml", text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        choose_thresholds(KNOWN, file=tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not TOML"):
        choose_thresholds(KNOWN, file=tmp_path / "bytes.toml")
