"""What the program was told to do, and what it logged, each with how it is known."""

from meshscope.analyze.training.logged import LoggedScalar
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


def show_logged(report: Report, detail: Detail) -> Section | None:
    """Numbers by the names they were logged under; None without any."""
    rows = known(report.study.logged)
    if not rows:
        return None
    table = Table(
        (
            make_column("name", rows, lambda r: form.clean_text(r.name, _MAX_NAME), 9,
                        is_right=False),
            make_column("logged by", rows, lambda r: form.clean_text(r.logged_by), 7,
                        is_right=False),
            make_column("values", rows, lambda r: form.count(r.num_values), 3),
            make_column("steps", rows, _show_steps, 2),
            make_column("first", rows, lambda r: form.or_dash(r.first, _show_number), 6),
            make_column("last", rows, lambda r: form.or_dash(r.last, _show_number), 8),
            make_column("lowest", rows, lambda r: form.or_dash(r.lowest, _show_number), 5),
            make_column("highest", rows, lambda r: form.or_dash(r.highest, _show_number), 4),
        )
    )  # fmt: skip
    note = "as the lowest rank logged them"
    return Section(key="logged", title="Logged", note=note, parts=(table,))


def _show_steps(row: LoggedScalar) -> str:
    return f"{row.first_step}–{row.last_step}"


def _show_number(value: float) -> str:
    return f"{value:.4g}"
