"""What callbacks left in a recording: steps, scalars by name, settings by group."""

from dataclasses import dataclass
from pathlib import Path

from meshscope.analyze.rank.signals import read_scalars
from meshscope.analyze.training.settings import read_settings
from meshscope.store.read.run import open_run


@dataclass
class Found:
    steps: list[int]
    scalars: dict[str, list[tuple[int, float]]]
    settings: dict[str, dict[str, object]]
    known_by: dict[str, str]
    spans: list[str]


def read_run(recorder) -> Found:
    """Closes the recorder, which must have caught nothing."""
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    return read_folder(run_dir)


def read_folder(run_dir: Path) -> Found:
    attempt = open_run(run_dir).last_attempt
    rank = attempt.ranks[0]
    series = read_scalars(rank, frozenset(rank.names.values()))
    groups = read_settings(attempt)
    spans = rank.read("spans")
    return Found(
        steps=[int(step) for step in rank.read("steps")["step"]],
        scalars={
            name: [
                (int(step), float(value)) for step, value in zip(one.step, one.value, strict=True)
            ]
            for name, one in series.items()
        },
        settings={group.name: dict(group.values) for group in groups},
        known_by={group.name: group.known_by for group in groups},
        spans=[rank.name_of(int(name_id)) for name_id in spans["name_id"]],
    )
