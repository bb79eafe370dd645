"""What torch.compile made in a rank's steps, and why again.

The recorder writes a journal line per compilation (a few hundred at most): where the program called
what was compiled, and which guard of the code made before had failed. One without a reason is a
first compilation. What a line says is checked: times and texts that make no sense make none.
"""

from dataclasses import dataclass

from meshscope.store.read.recording import JsonFields, Recording

_LINE = "compilation"
_MAX_TEXT = 300
_MAX_LINES = 10_000
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One, of a forward or of its backward."""

    compile_id: str
    """torch's, the same for a forward and its backward."""
    step: int
    start_ns: int
    """Host monotonic clock of the rank."""
    duration_ns: int
    function: str
    """`model.py:40 forward`; empty when torch did not say."""
    where: str
    """The program's frames that called it, the innermost first; empty in a thread of autograd."""
    reason: str
    """The guard that failed; empty for the first compilation of a function."""


def read_compilations(recording: Recording) -> tuple[Compilation, ...]:
    """All of a rank, in order of time."""
    found = [_read(update.get(_LINE)) for update in recording.updates[-_MAX_LINES:]]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.start_ns))


def _read(fields: object) -> Compilation | None:
    if not isinstance(fields, dict):
        return None
    step, start_ns = _number(fields, "step"), _number(fields, "start_host_mono_ns")
    duration_ns = _number(fields, "duration_ns")
    if min(step, start_ns, duration_ns) < 0:
        return None
    return Compilation(
        compile_id=_text(fields, "compile_id"),
        step=step,
        start_ns=start_ns,
        duration_ns=duration_ns,
        function=_text(fields, "function"),
        where=_text(fields, "where"),
        reason=_text(fields, "reason"),
    )


def _number(fields: JsonFields, name: str) -> int:
    value = fields.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) and value < _MAX_NUMBER else -1


def _text(fields: JsonFields, name: str) -> str:
    value = fields.get(name)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""
