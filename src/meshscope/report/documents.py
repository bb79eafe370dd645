"""Every JSON document: name to version, type and where keys are not fields; and their schemas."""

from meshscope.analyze.memory.memory_attribution import MemoryOverview
from meshscope.plan.answer import PlanAnswer
from meshscope.plan.fits import FitAnswer
from meshscope.plan.schedule_choice import ScheduleChoice
from meshscope.report import alarm_event, listings, trace_document
from meshscope.report.doctor import check as doctor
from meshscope.report.encode import Shapes, encode_schema
from meshscope.report.run import document
from meshscope.report.sections import compare, hang, memory, plan, schedule, simulate, snapshot
from meshscope.simulate.simulation import Simulation

DOCUMENTS: dict[str, tuple[int, type, Shapes]] = {
    name: (version, kind, shapes)
    for (name, version), kind, shapes in (
        (document.DOCUMENT, document.Document, document.SHAPES),
        (compare.DOCUMENT, compare.Compared, compare.SHAPES),
        (hang.DOCUMENT, hang.HangDocument, hang.SHAPES),
        (memory.DOCUMENT, MemoryOverview, {}),
        (schedule.DOCUMENT, ScheduleChoice, {}),
        (plan.DOCUMENT, PlanAnswer, {}),
        (plan.FITS, FitAnswer, {}),
        (simulate.DOCUMENT, Simulation, simulate.SHAPES),
        (snapshot.DOCUMENT, snapshot.SnapshotDocument, {}),
        (trace_document.DOCUMENT, trace_document.TraceDocument, {}),
        (doctor.DOCUMENT, doctor.Examination, {}),
        (alarm_event.DOCUMENT, alarm_event.AlarmEvent, alarm_event.SHAPES),
        (listings.RUNS, listings.RunsDocument, {}),
        (listings.RULES, listings.RulesDocument, {}),
        (listings.RULE, listings.RuleFacts, {}),
        (listings.COUNTERPARTS, listings.CounterpartsDocument, {}),
        (listings.ROWS, listings.RowsDocument, {}),
    )
}


def render_schemas() -> dict[str, str]:
    """Text of every schema by the name of its file in `docs/schemas`."""
    return {
        f"{name}.schema.json": encode_schema(name, *described)
        for name, described in DOCUMENTS.items()
    }
