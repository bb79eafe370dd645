"""The section on memory: what a leak and a quiet rank look like, and where the rest is."""

import re

import meshscope
from signal_builders import MB, make_signal_run


def test_a_leaking_rank_comes_first_with_its_growth(tmp_path):
    run = make_signal_run(
        tmp_path,
        num_ranks=20,
        num_steps=40,
        rss=lambda rank, step: (300 + 5 * step * (rank == 2) + 0.01 * (step * 7 % 5)) * MB,
    )
    study = meshscope.study(run)
    text = study.report().to_text("memory")
    rows = [line.split() for line in text.splitlines() if " host " in line]
    assert len(rows) == 16
    assert rows[0][:2] == ["2", "host"]
    assert re.search(r"5\.00 MiB per step", " ".join(rows[0]))
    assert rows[1][-1] == "level"
    assert "4 rows not shown (--all-ranks)" in text
    assert study.study.memory.ranks[2].peak_step == 39
