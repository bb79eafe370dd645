"""Predicted against measured: the step, each line of the budget, each stage's memory."""

from meshscope.analyze.prediction import CheckedTime, PredictionCheck
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Part, Section, Table, Tone, make_column, make_facts

KEY, TITLE = "prediction", "Predicted and measured"


def show_prediction(report: Report, detail: Detail) -> Section | None:
    """None where nothing was predicted."""
    found = report.prediction
    return None if found is None or isinstance(found, Unavailable) else _describe(found)


def _describe(check: PredictionCheck) -> Section:
    parts: list[Part] = []
    if isinstance(check.step, Unavailable):
        reason = form.clean_text(check.step.reason)
        parts.append(Line(f"Step time was not predicted: {reason}", Tone.QUIET))
    else:
        parts += [_make_times((*check.lines, check.step)), _judge(check)]
        parts += [
            Line(f"Fitted before the run: {form.clean_text(one)}", Tone.QUIET)
            for one in check.fitted
        ]
    if check.memory:
        parts += _show_memory(check)
    note = "stored before the first step; left over = measured − predicted, not fitted"
    return Section(key=KEY, title=TITLE, note=note, parts=tuple(parts))


def _make_times(rows: tuple[CheckedTime, ...]) -> Table:
    step_ns = rows[-1].measured_ns
    return Table(
        (
            make_column("", rows, lambda row: form.clean_text(row.name), 3, is_right=False),
            make_column("predicted", rows, lambda row: form.duration(row.predicted_ns), 2),
            make_column("measured", rows, lambda row: form.duration(row.measured_ns), 2),
            make_column("left over", rows, lambda row: form.duration(row.residual_ns), 2),
            make_column("of the step", rows, lambda row: form.ratio(row.residual_ns / step_ns), 2),
        )
    )


def _judge(check: PredictionCheck) -> Part:
    width = form.or_reason(check.interval_ratio, form.ratio)
    where = "inside" if check.is_within is True else "outside"
    source = form.or_reason(check.calibrated_on, form.clean_text)
    return make_facts(
        [
            ("Interval", f"± {width} of the predicted step; the measured step is {where} of it"),
            ("Calibrated on", source),
        ]
    )


def _show_memory(check: PredictionCheck) -> list[Part]:
    rows = check.memory
    parts: list[Part] = [
        Table(
            (
                make_column("pp rank", rows, lambda row: str(row.pp_rank), 3),
                make_column("predicted", rows, lambda row: form.memory(row.predicted_bytes), 2),
                make_column(
                    "measured",
                    rows,
                    lambda row: form.or_dash(row.measured_bytes, form.memory),
                    2,
                ),
                make_column(
                    "left over",
                    rows,
                    lambda row: form.or_dash(
                        row.residual_bytes,
                        lambda size: form.ratio(size / max(1, row.predicted_bytes)),
                    ),
                    2,
                ),
            )
        )
    ]
    reasons = {one.measured_bytes.reason for one in rows
               if isinstance(one.measured_bytes, Unavailable)}  # fmt: skip
    return parts + [Line(form.clean_text(reason), Tone.QUIET) for reason in sorted(reasons)]
