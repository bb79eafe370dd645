"""What a profiler's trace does not have and a recording has, each with the reason shown instead."""

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import Recording

NO_END = "traces do not say how the job ended"
NO_COST = "traces do not say what the profiler cost"
NO_DROPPED = "traces do not say how many events the profiler dropped"
NO_COMMUNICATION = "the traces have no communication: there was none, or it was not traced"
NO_HOST = "traces do not name their host"
NOT_SAMPLED = "memory was not sampled"
_NO_RESIDENT = "traces do not have the memory of the process"
_HOST_ONLY = "the traces have only the host's allocator: `meshscope trace FILE` shows it"
_NO_MEMORY = "the traces have no [memory] events: profile with profile_memory=True"


def explain_no_memory(recording: Recording) -> Unavailable:
    """Why a rank has no samples of memory."""
    if not recording.is_from_trace:
        return Unavailable(NOT_SAMPLED)
    return Unavailable(_HOST_ONLY if recording.header.get("has_host_memory") else _NO_MEMORY)


def explain_no_resident(recording: Recording) -> Unavailable:
    """Why a rank has no resident set."""
    return Unavailable(_NO_RESIDENT if recording.is_from_trace else NOT_SAMPLED)
