from meshscope.diagnose.wording import be, capitalize, duration, name_ranks, p_value


def test_ranks_and_their_verb():
    assert f"{name_ranks((5,))} {be((5,))}" == "rank 5 is"
    assert f"{name_ranks((0, 1, 2, 7))} {be((0, 1, 2, 7))}" == "ranks 0-2, 7 are"


def test_probabilities_are_not_given_more_digits_than_they_deserve():
    assert p_value(0.01234) == "p = 0.012"
    assert p_value(1e-30) == "p < 1e-9"


def test_sentences_begin_with_a_capital_and_keep_the_rest():
    assert capitalize("rank 5 uses NCCL") == "Rank 5 uses NCCL"
    assert capitalize("") == ""


def test_units_are_those_of_the_report():
    assert duration(31e6) == "31.0 ms"
