"""Sizes of ranks, from what their journals say."""

import pytest

from builders import make_writer
from meshscope.analyze.pipeline.stage_sizes import SizeKind, read_rank_sizes
from meshscope.store.read.run import open_run


def read_sizes(path, *ranks):
    for rank, update in enumerate(ranks):
        writer = make_writer(path / "run", rank, len(ranks))
        writer.journal.write("update", **update)
        writer.close(end_host_mono_ns=1, num_errors=0, errors={})
    found = read_rank_sizes(open_run(path / "run").last_attempt, {})
    return {kind: sizes.tolist() for kind, sizes in found.by_kind.items()}


def test_layers_are_the_most_common_part_of_all_stages_of_a_rank(tmp_path):
    first = {"stage_layers": {"0": {"Block": 2, "Embedding": 1}, "2": {"Block": 3}}}
    last = {"stage_layers": {"1": {"Block": 2}}}
    assert read_sizes(tmp_path, first, last) == {SizeKind.LAYERS: [5, 2]}


def test_what_one_rank_lacks_measures_none(tmp_path):
    sizes = read_sizes(
        tmp_path,
        {"parameter_bytes": 1 << 20, "model_layers": [{"Block": 2}]},
        {"parameter_bytes": 1 << 21},
    )
    assert sizes == {SizeKind.PARAMETERS: [1 << 20, 1 << 21]}


@pytest.mark.parametrize("value", [-1, 0, True, "8", None, 1 << 70])
def test_bytes_that_cannot_be_are_not_believed(tmp_path, value):
    assert read_sizes(tmp_path, {"parameter_bytes": value}, {"parameter_bytes": 8}) == {}
