"""Every JSON document but the report: name to version, type and where keys are not fields."""

from meshscope.analyze.memory.memory_attribution import MemoryOverview
from meshscope.report import listings, trace_document
from meshscope.report.encode import Shapes
from meshscope.report.sections import compare, hang, memory, simulate, snapshot
from meshscope.simulate.simulation import Simulation

DOCUMENTS: dict[str, tuple[int, type, Shapes]] = {
    name: (version, kind, shapes)
    for (name, version), kind, shapes in (
        (compare.DOCUMENT, compare.Compared, compare.SHAPES),
        (hang.DOCUMENT, hang.HangDocument, hang.SHAPES),
        (memory.DOCUMENT, MemoryOverview, {}),
        (simulate.DOCUMENT, Simulation, simulate.SHAPES),
        (snapshot.DOCUMENT, snapshot.SnapshotDocument, {}),
        (trace_document.DOCUMENT, trace_document.TraceDocument, {}),
        (listings.RUNS, listings.RunsDocument, {}),
        (listings.RULES, listings.RulesDocument, {}),
        (listings.RULE, listings.RuleFacts, {}),
        (listings.COUNTERPARTS, listings.CounterpartsDocument, {}),
        (listings.ROWS, listings.RowsDocument, {}),
    )
}
