"""One line about a run, for logs and for terminals that cannot be drawn on."""

import time

from meshscope.page.run_state import StateKind
from meshscope.report import format as form
from meshscope.watch.watched import Watched


def write_line(watched: Watched) -> str:
    """`00:12:07 train live step 28 3.40 steps/s 3,498 tok/s loss 3.21 8 ranks: Rank 5 …`"""
    moment, now = watched.moment, time.strftime("%H:%M:%S")
    if moment is None:
        return f"{now} {watched.name} waiting: {watched.problem or 'nothing was read yet'}"
    parts = [now, watched.name, name_state(watched), describe_step(watched)]
    if moment.pace_ns:
        parts.append(f"{1e9 / moment.pace_ns:.3g} steps/s")
    parts += describe_tokens(watched)
    if watched.losses:
        parts.append(f"loss {watched.losses[-1]:.4g}")
    parts.append(describe_ranks(watched))
    return f"{' '.join(parts)}: {tell_verdict(watched)}"


def name_state(watched: Watched) -> str:
    return watched.state.kind.value


def describe_step(watched: Watched) -> str:
    step = None if watched.moment is None else watched.moment.step
    return "no step yet" if step is None else f"step {form.count(step)}"


def describe_tokens(watched: Watched) -> list[str]:
    """Of the job, as the report has it; before that, of one rank."""
    moment, glance = watched.moment, watched.glance
    if glance is not None and glance.tokens_per_s is not None:
        return [f"{form.count(round(glance.tokens_per_s))} tok/s"]
    if moment is None or moment.tokens_per_s is None:
        return []
    return [f"{form.count(round(moment.tokens_per_s))} tok/s of one rank"]


def describe_ranks(watched: Watched) -> str:
    moment = watched.moment
    if moment is None:
        return ""
    if moment.num_ranks < moment.world_size:
        return f"{moment.num_ranks} of {moment.world_size} ranks"
    return form.plural(moment.num_ranks, "rank")


def tell_verdict(watched: Watched) -> str:
    """The sentence on top: what holds the job up, why it failed, or the worst finding."""
    state, glance = watched.state, watched.glance
    if state.kind is StateKind.STUCK:
        return form.clean_text(f"{state.text}. {state.note}", 300)
    if state.kind is StateKind.FAILED and (glance is None or glance.tone in ("ok", "not known")):
        return form.clean_text(f"{state.text}: {state.note}", 300)
    if glance is not None:
        return glance.verdict
    if watched.moment is None:
        return "waiting for the first rank to record"
    return "no verdict yet: the first report is being made"
