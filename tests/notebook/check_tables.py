"""Tables and notebooks with the real packages: `make test-notebook`."""

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import meshscope
from late_runs import STEADY, LateRun
from meshscope.core.layout import Layout
from meshscope.report.tables import REPORT_TABLES


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    LateRun(layout=Layout(dp=4), work=lambda rank, step: STEADY, num_steps=20).record(path)
    return meshscope.study(path)


@pytest.mark.parametrize("name", [*REPORT_TABLES, "steps", "collectives"])
def test_each_package_has_the_same_columns_and_rows(study, name):
    table = study.table(name)
    frame, polar, arrow = table.to_pandas(), table.to_polars(), table.to_arrow()
    assert isinstance(frame, pd.DataFrame)
    assert isinstance(polar, pl.DataFrame)
    assert isinstance(arrow, pa.Table)
    for made in (frame, polar, arrow):
        names = made.column_names if isinstance(made, pa.Table) else list(made.columns)
        assert (len(made), names) == (table.num_rows, list(table))
    numbers = [name for name, values in table.items() if values.dtype.kind in "iu"]
    for name in numbers:
        expected = table[name].tolist()
        assert frame[name].tolist() == polar[name].to_list() == arrow[name].to_pylist() == expected


def test_packages_take_a_table_by_themselves(study):
    table = study.table("budget")
    assert len(pd.DataFrame(table)) == len(pl.DataFrame(table)) == len(pa.table(table)) > 0


def test_a_notebook_runs_and_shows_the_study(study, tmp_path):
    """As Jupyter does it: IPython's formatter asks the object for HTML."""
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(study)
    assert shown["text/html"].startswith('<div class="meshscope">')
    assert "<script" not in shown["text/html"]
