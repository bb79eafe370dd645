"""What the program was told to do: hyper-parameters and arguments, with how they are known."""

from meshscope.analyze.training.settings import SettingsGroup
from meshscope.core.unavailable import known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Part, Section, Table, Tone, make_column

_MAX_NAME = 60
_MAX_VALUE = 100


def show_settings(report: Report, detail: Detail) -> Section | None:
    """One table per source; None if nothing was recorded."""
    groups = known(report.study.settings)
    if not groups:
        return None
    parts = [part for group in groups for part in _show_group(group)]
    note = "as the lowest rank recorded them"
    return Section(key="settings", title="Settings", note=note, parts=tuple(parts))


def _show_group(group: SettingsGroup) -> list[Part]:
    rows = [(form.clean_text(name, _MAX_NAME), value) for name, value in group.values.items()]
    known_by = form.clean_text(group.known_by)
    parts: list[Part] = [Line(f"{form.clean_text(group.name, _MAX_NAME)}: {known_by}", Tone.STRONG)]
    if rows:
        parts.append(
            Table(
                (
                    make_column("name", rows, lambda row: row[0], 9, is_right=False),
                    make_column("value", rows, lambda row: _show(row[1]), 8, is_right=False),
                )
            )
        )
    if group.num_left_out:
        parts.append(Line(f"{form.count(group.num_left_out)} more are not stored", Tone.QUIET))
    return parts


def _show(value: object) -> str:
    return form.clean_text(str(value), _MAX_VALUE) or "(empty)"
