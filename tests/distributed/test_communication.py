"""Communication capture against real gloo ranks: what torch.profiler counted is what we recorded.

`communication_scenarios` runs once and does the work; see there for the programs. Here the size of
every operation is worked out from the profiler's shapes and compared with the recording, one by
one and in order.
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.run_program import run_program

from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.schema import NoteCode, OperationFlag, WaitSource
from meshscope.store.write.groups import Group

pytest.importorskip("torch", reason="communication is recorded in torch")

pytestmark = [pytest.mark.gloo]

PROFILED = ("plain", "ddp", "ddp_hook", "fsdp2", "tp", "pp", "mesh", "compiled")
TRAINED = PROFILED[1:]
NUM_RANKS = 8
NUM_STEPS = 3
GRADIENT_BYTES = 4 * (4 * (16 * 16 + 16) + 2 * 16)
"""Of the model in `ddp`: four linear layers and the two vectors of a BatchNorm, in float32."""


@dataclass(frozen=True)
class Operation:
    """A row of `collectives` in words."""

    kind: str
    size_bytes: int
    dtype: str
    outcome: Outcome
    end_source: EndSource
    flags: int
    group: Group
    sequence: int
    peer: int
    tag: int
    phase: str
    step: int
    microbatch: int
    enqueue_ns: int
    start_ns: int
    end_ns: int

    @property
    def channel(self) -> tuple[Any, ...]:
        if self.kind in ("send", "recv"):
            return self.group.group_id, self.kind, self.peer, self.tag
        return (self.group.group_id,)


@dataclass(frozen=True)
class Outside:
    """An operation as torch.profiler saw it: its name, its tensors and its scalars."""

    op: str
    inputs: list[Any]
    labels: dict[str, str]

    def tensors(self, index: int) -> list[dict[str, Any]]:
        value = self.inputs[index]
        return value if isinstance(value, list) else [value]

    def total_bytes(self, index: int) -> int:
        return sum(math.prod(t["sizes"]) * t["itemsize"] for t in self.tensors(index))


@dataclass(frozen=True)
class Rule:
    """How kind, size, peer and tag follow from what the profiler saw."""

    kind: str
    tensors: int | None
    """Which argument's bytes are the size."""
    is_share: bool = False
    """Times the number of ranks: a list of lists of tensors is not in the profiler's data."""
    peer: int | None = None
    tag: int | None = None


RULES = {
    "allreduce_": Rule("all_reduce", 0),
    "allreduce_coalesced_": Rule("all_reduce", 0),
    "allgather_": Rule("all_gather", 1, is_share=True),
    "allgather_coalesced_": Rule("all_gather", 1, is_share=True),
    "_allgather_base_": Rule("all_gather", 0),
    "allgather_into_tensor_coalesced_": Rule("all_gather", 0),
    "reduce_scatter_": Rule("reduce_scatter", 0, is_share=True),
    "_reduce_scatter_base_": Rule("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": Rule("reduce_scatter", 1),
    "broadcast_": Rule("broadcast", 0, peer=2),
    "reduce_": Rule("reduce", 0, peer=3),
    "scatter_": Rule("scatter", 0, is_share=True, peer=3),
    "gather_": Rule("gather", 1, is_share=True, peer=3),
    "alltoall_": Rule("all_to_all", 1),
    "alltoall_base_": Rule("all_to_all", 1),
    "send": Rule("send", 0, peer=2, tag=3),
    "recv_": Rule("recv", 0, peer=2, tag=3),
    "recv_any_source_": Rule("recv", 0, tag=2),
    "barrier": Rule("barrier", None),
    "monitored_barrier_": Rule("barrier", None),
}


def expect(seen: Outside, group: Group) -> tuple[str, int, str, int, int]:
    """Kind, bytes, number format, peer and tag the recording must have."""
    rule = RULES[seen.op]
    size_bytes, dtype = 0, ""
    if rule.tensors is not None:
        size_bytes = seen.total_bytes(rule.tensors) * (len(group.ranks) if rule.is_share else 1)
        (dtype,) = {t["dtype"].removeprefix("torch.") for t in seen.tensors(rule.tensors)}
    if "size" in seen.labels:
        size_bytes = int(seen.labels["size"])
    peer = -1 if rule.peer is None else group.ranks[seen.inputs[rule.peer]]
    tag = 0 if rule.tag is None else min(seen.inputs[rule.tag], 127)
    return rule.kind, size_bytes, dtype, peer, tag


@dataclass(frozen=True)
class Finished:
    """What a scenario left behind."""

    folder: Path

    def recording(self, rank: int, name: str = "run", attempt: int = 0) -> Recording:
        return _open(self.folder / name, attempt)[rank]

    def operations(self, rank: int, name: str = "run", attempt: int = 0) -> list[Operation]:
        return _read_operations(self.folder / name, rank, attempt)

    def facts(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"rank{rank}.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def profiled(self, rank: int, key: str = "profiled") -> list[Outside]:
        return [
            Outside(
                event["op"],
                event["inputs"],
                {k: v for k, v in event.items() if k in ("group", "handle", "size")},
            )
            for event in self.facts(rank)[key]
        ]

    def pairs(self, rank: int) -> list[tuple[Outside, Operation]]:
        """Both lists are in the order of the calls."""
        return list(zip(self.profiled(rank), self.operations(rank), strict=True))

    @property
    def ranks(self) -> range:
        return range(len(json.loads((self.folder / "exit_codes.json").read_text())))


@cache
def _open(path: Path, attempt: int) -> dict[int, Recording]:
    return open_run(path).attempts[attempt].ranks


@cache
def _read_operations(path: Path, rank: int, attempt: int) -> list[Operation]:
    recording = _open(path, attempt)[rank]
    table = recording.read("collectives")
    columns = [table[name].tolist() for name in _COLUMNS]
    operations = [
        Operation(
            kind=Kind(kind).label,
            size_bytes=size_bytes,
            dtype=DTYPES[dtype],
            outcome=Outcome(outcome),
            end_source=EndSource(end_source),
            flags=flags,
            group=recording.groups[group_id],
            sequence=sequence,
            peer=peer,
            tag=tag,
            phase=recording.name_of(phase_id) if phase_id else "",
            step=step,
            microbatch=microbatch,
            enqueue_ns=enqueue_ns,
            start_ns=start_ns,
            end_ns=end_ns,
        )
        for (
            kind, size_bytes, dtype, outcome, end_source, flags, group_id, sequence, peer, tag,
            phase_id, step, microbatch, enqueue_ns, start_ns, end_ns,
        ) in zip(*columns, strict=True)
    ]  # fmt: skip
    assert not recording.problems, recording.problems
    return sorted(operations, key=lambda operation: operation.enqueue_ns)


_COLUMNS = (
    "kind", "size_bytes", "dtype", "outcome", "end_source", "flags", "group_id", "sequence", "peer",
    "tag", "phase_id", "step", "microbatch", "enqueue_host_mono_ns", "start_host_mono_ns",
    "end_host_mono_ns",
)  # fmt: skip


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all scenarios; each test looks at its own, and at its exit codes."""
    folder = tmp_path_factory.mktemp("communication")
    said = run_program(
        "communication_scenarios", folder, timeout_s=170, is_strict=False, is_checked=False
    )
    (folder / "output.txt").write_text(said, encoding="utf-8")
    return folder


def finished(folder: Path, name: str, exit_codes: list[int] | None = None) -> Finished:
    home = folder / name
    found = json.loads((home / "exit_codes.json").read_text()) if home.exists() else None
    if exit_codes is None and found is not None:
        exit_codes = [0] * len(found)
    assert found == exit_codes, (folder / "output.txt").read_text(encoding="utf-8")[-8000:]
    return Finished(home)


# --- every operation, once, with its size -----------------------------------------------------


@pytest.mark.parametrize("name", PROFILED)
def test_what_the_profiler_saw_is_what_was_recorded(scenarios: Path, name: str) -> None:
    """None missing, none twice, in the same order, each with its bytes, peer and tag."""
    done = finished(scenarios, name)
    for rank in done.ranks:
        seen, operations = done.profiled(rank), done.operations(rank)
        assert Counter(RULES[s.op].kind for s in seen) == Counter(o.kind for o in operations)
        for outside, operation in done.pairs(rank):
            found = (
                operation.kind,
                operation.size_bytes,
                operation.dtype,
                operation.peer,
                operation.tag,
            )
            assert found == expect(outside, operation.group), (rank, outside, operation)
            if "group" in outside.labels:
                assert operation.group.name == outside.labels["group"]
        assert len({operation.enqueue_ns for operation in operations}) == len(operations)


def test_the_plain_program_calls_every_operation_gloo_has(scenarios: Path) -> None:
    done = finished(scenarios, "plain")
    called = {outside.op for rank in done.ranks for outside in done.profiled(rank)}
    assert called == set(RULES)
    assert min(len(done.profiled(rank)) for rank in done.ranks) > 150


@pytest.mark.parametrize("name", TRAINED)
def test_recording_adds_no_operation_and_changes_no_bit_of_the_training(
    scenarios: Path, name: str
) -> None:
    done = finished(scenarios, name)
    for rank in done.ranks:
        facts = done.facts(rank)
        assert done.profiled(rank) == done.profiled(rank, "profiled_bare")
        assert facts["losses"] == facts["losses_bare"]
        assert all(math.isfinite(loss) for loss in facts["losses"])
    assert any(done.facts(rank)["losses"] for rank in done.ranks)


@pytest.mark.parametrize("name", [*PROFILED, "threads", "regrouped"])
def test_sequences_are_contiguous_on_every_channel(scenarios: Path, name: str) -> None:
    done = finished(scenarios, name)
    for rank in done.ranks:
        channels = defaultdict(list)
        for operation in done.operations(rank):
            channels[operation.channel].append(operation.sequence)
        for channel, sequences in channels.items():
            assert sequences == list(range(len(sequences))), (rank, channel)


@pytest.mark.parametrize("name", [*PROFILED, "threads", "regrouped"])
def test_every_operation_of_a_finished_run_has_an_end(scenarios: Path, name: str) -> None:
    done = finished(scenarios, name)
    for rank in done.ranks:
        for operation in done.operations(rank):
            assert operation.start_ns >= operation.enqueue_ns
            if operation.outcome is Outcome.UNSEEN:
                assert (operation.end_ns, operation.end_source) == (-1, EndSource.NONE)
            else:
                assert operation.outcome is Outcome.OK, (rank, operation)
                assert operation.end_source is not EndSource.NONE
                assert operation.end_ns >= operation.start_ns


def test_only_a_handle_that_was_dropped_has_an_unseen_end(scenarios: Path) -> None:
    for name in PROFILED:
        done = finished(scenarios, name)
        for rank in done.ranks:
            dropped = []
            for outside, operation in done.pairs(rank):
                if outside.labels.get("handle") == "dropped":
                    dropped.append(operation)
                else:
                    assert operation.outcome is Outcome.OK
            unseen = [operation for operation in dropped if operation.outcome is Outcome.UNSEEN]
            called_back = [operation for operation in dropped if operation.outcome is Outcome.OK]
            assert bool(dropped) == (name == "plain")
            assert bool(unseen) == bool(called_back) == (name == "plain")
            ended = {(o.kind, o.size_bytes, o.end_source) for o in called_back}
            assert {source for *_, source in ended} <= {EndSource.FUTURE}, ended


@pytest.mark.parametrize("name", [*PROFILED, "threads", "regrouped"])
def test_the_recorder_caught_no_error_of_its_own(scenarios: Path, name: str) -> None:
    done = finished(scenarios, name)
    for rank in done.ranks:
        closing = done.recording(rank).closing
        assert closing is not None
        assert (closing["num_errors"], closing["errors"]) == (0, {})
        assert closing["num_operations"] == len(done.operations(rank))
        assert closing["num_operations_unrecognised"] == 0


@pytest.mark.parametrize("name", PROFILED)
def test_ranks_agree_on_every_collective(scenarios: Path, name: str) -> None:
    """The n-th of a group is the same operation everywhere. A group is its members and its number
    among those with the same members; an all-to-all may be uneven."""
    done = finished(scenarios, name)
    found: dict[tuple[Any, ...], set[tuple[str, int]]] = defaultdict(set)
    members: Counter[tuple[Any, ...]] = Counter()
    for rank in done.ranks:
        for operation in done.operations(rank):
            if operation.kind in ("send", "recv"):
                continue
            key = (operation.group.name, operation.group.ranks, operation.sequence)
            size_bytes = -1 if operation.kind == "all_to_all" else operation.size_bytes
            found[key].add((operation.kind, size_bytes))
            members[key] += 1
    for key, kinds in found.items():
        assert len(kinds) == 1, (key, kinds)
        assert members[key] == len(key[1]), key


@pytest.mark.parametrize("name", ["plain", "pp", "mesh"])
def test_sends_match_receives(scenarios: Path, name: str) -> None:
    done = finished(scenarios, name)
    sent: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    received: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in done.ranks:
        for operation in done.operations(rank):
            where = (operation.group.name, operation.group.ranks, operation.tag)
            if operation.kind == "send":
                sent[*where, rank, operation.peer].append(operation.size_bytes)
            elif operation.kind == "recv" and operation.peer >= 0:
                received[*where, operation.peer, rank].append(operation.size_bytes)
            elif operation.kind == "recv":  # from anyone: the plain program does it with tag 9
                received[*where, operation.group.ranks[1], rank].append(operation.size_bytes)
    assert sent == received
    assert sum(len(sizes) for sizes in sent.values()) > 50


# --- groups -----------------------------------------------------------------------------------


def test_groups_are_recorded_with_their_members_and_descriptions(scenarios: Path) -> None:
    done = finished(scenarios, "plain")
    for rank in done.ranks:
        groups = {
            group.name: {"ranks": list(group.ranks), "description": group.description}
            for group in done.recording(rank).groups.values()
        }
        assert groups == done.facts(rank)["groups"]
        assert {group.backend for group in done.recording(rank).groups.values()} == {"gloo"}


def test_the_axes_of_a_mesh_are_told_by_the_groups_descriptions(scenarios: Path) -> None:
    done = finished(scenarios, "mesh")
    for rank in done.ranks:
        axes = defaultdict(set)
        kinds = defaultdict(set)
        for operation in done.operations(rank):
            axes[operation.group.description].add(operation.group.ranks)
            kinds[operation.group.description].add(operation.kind)
        expected = done.facts(rank)["mesh"]
        assert axes == {f"mesh_{name}": {tuple(ranks)} for name, ranks in expected.items()}
        assert kinds["mesh_pp"] == {"send", "recv"}
        assert kinds["mesh_dp"] == {"all_gather", "reduce_scatter"}
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= kinds["mesh_tp"]


def test_a_name_that_torch_uses_again_is_another_group(scenarios: Path) -> None:
    """Halves of the ranks, then every other rank, then halves again, which go on counting."""
    done = finished(scenarios, "regrouped")
    for rank in done.ranks:
        expected = [
            (kind, 4 * (turn + 1), tuple(group["ranks"]), 4 * (turn == 2) + 2 * again + index)
            for turn, group in enumerate(done.facts(rank)["groups"])
            for again in range(2)
            for index, kind in enumerate(("all_reduce", "broadcast"))
        ]
        operations = [o for o in done.operations(rank) if o.kind != "barrier"]
        found = [(o.kind, o.size_bytes, o.group.ranks, o.sequence) for o in operations]
        assert found == expected
        roots = [o.peer for o in operations if o.kind == "broadcast"]
        assert roots == [group["ranks"][-1] for group in done.facts(rank)["groups"] for _ in "12"]


def test_threads_that_communicate_at_once_keep_their_channels_apart(scenarios: Path) -> None:
    done = finished(scenarios, "threads")
    for rank in done.ranks:
        groups = done.facts(rank)["groups"]
        found = Counter(
            (operation.group.name, operation.size_bytes) for operation in done.operations(rank)
        )
        assert found == {(name, 4 * group["num_elements"]): 40 for name, group in groups.items()}


# --- labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size_bytes"), [("ddp", 4), ("ddp_hook", 2)])
def test_gradients_are_reduced_in_the_backward_of_their_step(
    scenarios: Path, name: str, size_bytes: int
) -> None:
    """The first of two microbatches is not synchronised, so it has no all-reduce."""
    done = finished(scenarios, name)
    for rank in done.ranks:
        recording = done.recording(rank)
        spans = recording.read("spans")
        backwards = [
            (start, start + duration, microbatch)
            for name_id, start, duration, microbatch in zip(
                *(
                    spans[column].tolist()
                    for column in ("name_id", "start_host_mono_ns", "duration_ns", "microbatch")
                ),
                strict=True,
            )
            if recording.name_of(name_id) == "backward"
        ]
        reduces = [o for o in done.operations(rank) if o.kind == "all_reduce"]
        for operation in reduces:
            assert operation.flags & OperationFlag.ENGINE
            assert (operation.phase, operation.microbatch) == ("backward", 1)
            inside = [m for start, end, m in backwards if start <= operation.enqueue_ns <= end]
            assert inside == [1]
        steps = Counter(operation.step for operation in reduces)
        assert steps[0] == 1, "torch begins with one bucket"
        assert steps[1] == steps[2] > 2, "and makes several of it after the first step"
        for step in range(NUM_STEPS):
            total_bytes = sum(o.size_bytes for o in reduces if o.step == step)
            assert total_bytes == GRADIENT_BYTES * size_bytes // 4


@pytest.mark.parametrize("name", ["ddp", "ddp_hook"])
def test_buffers_are_broadcast_in_the_forward_of_their_step(scenarios: Path, name: str) -> None:
    done = finished(scenarios, name)
    for rank in done.ranks:
        operations = done.operations(rank)
        assert {(o.phase, o.step) for o in operations if o.kind == "all_gather"} == {("", -1)}
        broadcasts = [o for o in operations if o.kind == "broadcast" and o.step >= 0]
        assert {(o.phase, o.step) for o in broadcasts} == {
            ("forward", step) for step in range(NUM_STEPS)
        }
        assert not any(o.flags for o in broadcasts), "they hold the program up"


def test_fully_sharded_training_gathers_in_forward_and_backward(scenarios: Path) -> None:
    done = finished(scenarios, "fsdp2")
    for rank in done.ranks:
        operations = done.operations(rank)
        for step in range(NUM_STEPS):
            assert Counter((o.kind, o.phase) for o in operations if o.step == step) == {
                ("all_gather", "forward"): 3,
                ("all_gather", "backward"): 3,
                ("reduce_scatter", "backward"): 3,
                ("all_reduce", "clip"): 1,
            }


def test_tensor_parallel_operations_are_told_from_data_parallel_ones(scenarios: Path) -> None:
    done = finished(scenarios, "tp")
    for rank in done.ranks:
        operations = [o for o in done.operations(rank) if o.step >= 0]
        by_step = [
            Counter((o.group.description, o.kind, o.phase) for o in operations if o.step == step)
            for step in range(NUM_STEPS)
        ]
        assert by_step == [by_step[0]] * NUM_STEPS
        assert by_step[0]["mesh_dp", "all_reduce", ""] == 12, "one for each parameter, by hand"
        assert by_step[0]["mesh_tp", "all_reduce", "optimizer"] == 4, "of norms, by DTensor"
        assert {phase for group, _, phase in by_step[0] if group == "mesh_tp"} == {
            "forward", "backward", "optimizer"
        }  # fmt: skip
        dp_ranks = {o.group.ranks for o in operations if o.group.description == "mesh_dp"}
        assert dp_ranks == {(rank % 4, rank % 4 + 4)}


def test_a_pipeline_sends_one_message_per_microbatch_each_way(scenarios: Path) -> None:
    done = finished(scenarios, "pp")
    for rank in done.ranks:
        sends = [o for o in done.operations(rank) if o.kind == "send" and o.dtype == "float32"]
        expected = {
            (step, peer): NUM_RANKS
            for step in range(NUM_STEPS)
            for peer in (rank - 1, rank + 1)
            if 0 <= peer < NUM_RANKS
        }
        assert Counter((o.step, o.peer) for o in sends) == expected


def test_waits_belong_to_recorded_operations(scenarios: Path) -> None:
    for name in PROFILED:
        done = finished(scenarios, name)
        sources = set()
        for rank in done.ranks:
            keys = {operation.enqueue_ns for operation in done.operations(rank)}
            waits = done.recording(rank).read("waits")
            of = waits["operation_enqueue_host_mono_ns"].tolist()
            assert {key for key in of if key >= 0} <= keys
            assert (waits["duration_ns"] >= 0).all()
            sources |= set(waits["source"].tolist())
        if name == "plain":
            # A call that was slow, on a busy machine, is one more source.
            assert sources - {WaitSource.CALL} == {WaitSource.WORK, WaitSource.TENSOR}
        elif name in ("tp", "compiled"):
            assert WaitSource.TENSOR in sources


# --- faults -----------------------------------------------------------------------------------

SURVIVORS = range(3)


def faults_of(scenarios: Path) -> Finished:
    return finished(scenarios, "faults", [0, 0, 0, -9])


def notes_of(done: Finished, rank: int) -> dict[int, str]:
    """Error messages by the operation's key."""
    recording = done.recording(rank)
    notes = recording.read("operation_notes")
    return {
        key: recording.name_of(name_id)
        for name_id, code, key in zip(
            notes["name_id"].tolist(),
            notes["code"].tolist(),
            notes["operation_enqueue_host_mono_ns"].tolist(),
            strict=True,
        )
        if code == NoteCode.ERROR
    }


def in_group(done: Finished, rank: int, description: str) -> list[Operation]:
    return [o for o in done.operations(rank) if o.group.description == description]


@pytest.mark.parametrize(
    ("description", "outcome", "sources"),
    [
        ("shapes", Outcome.ERROR, {EndSource.CALL}),
        ("late", Outcome.TIMEOUT, {EndSource.WAIT}),
        ("late_future", Outcome.TIMEOUT, {EndSource.WAIT, EndSource.FUTURE}),
        ("late_handle", Outcome.TIMEOUT, {EndSource.WAIT}),
        ("killed", Outcome.ERROR, {EndSource.WAIT, EndSource.CALL}),
        ("gone", Outcome.ERROR, {EndSource.WAIT}),
    ],
)
def test_a_failed_operation_is_recorded_with_its_message(
    scenarios: Path, description: str, outcome: Outcome, sources: set[EndSource]
) -> None:
    done = faults_of(scenarios)
    outcomes = set()
    for rank in SURVIVORS:
        message = done.facts(rank)["messages"][description]
        assert message, "the program saw the error"
        failed = [o for o in in_group(done, rank, description) if o.outcome is not Outcome.OK]
        # A peer whose patience ends first closes its connections: the others then see an error.
        seen = Outcome.TIMEOUT if "Timed out" in message else Outcome.ERROR
        assert [o.outcome for o in failed] == [seen], message
        outcomes.add(seen)
        assert failed[0].end_source in sources
        assert failed[0].end_ns >= failed[0].enqueue_ns
        note = notes_of(done, rank)[failed[0].enqueue_ns]
        assert note == f"RuntimeError: {message}"[:400]
    assert outcome in outcomes


def test_after_an_error_in_the_call_the_group_goes_on(scenarios: Path) -> None:
    done = faults_of(scenarios)
    for rank in done.ranks:
        found = [(o.kind, o.sequence, o.outcome) for o in in_group(done, rank, "shapes")]
        assert found == [
            ("all_reduce", 0, Outcome.OK),
            ("all_gather", 1, Outcome.ERROR),
            ("all_reduce", 2, Outcome.OK),
        ]


def test_a_killed_rank_leaves_what_it_was_waiting_for(scenarios: Path) -> None:
    done = faults_of(scenarios)
    recording = done.recording(3)
    assert recording.closing is None
    last = in_group(done, 3, "killed")[-1]
    assert (last.kind, last.peer, last.outcome) == ("recv", 0, Outcome.UNFINISHED)
    assert last.end_ns == -1
    in_flight = recording.in_flight()
    assert in_flight is not None
    assert len(in_flight.records) == 1
    assert in_group(done, 3, "late") == [], "it never came"


def test_faults_of_the_program_are_not_errors_of_the_recorder(scenarios: Path) -> None:
    done = faults_of(scenarios)
    for rank in SURVIVORS:
        closing = done.recording(rank).closing
        assert closing is not None
        assert closing["num_errors"] == 0


# --- the recorder's controls ------------------------------------------------------------------


def test_a_rank_that_paused_is_still_in_step_with_the_others(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    numbers = {
        rank: [(o.sequence, o.size_bytes) for o in in_group(done, rank, "paused")]
        for rank in done.ranks
    }
    assert numbers[1] == [(0, 4), (1, 4), (2, 8), (3, 8), (4, 8), (5, 12), (6, 12)]
    assert numbers[0] == [(0, 4), (1, 4), (5, 12), (6, 12)]


def test_communication_can_be_switched_off_and_on(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        sizes = [o.size_bytes for o in in_group(done, rank, "configured")]
        assert sizes == [4, 8, 16], "the two of 12 bytes came while it was off"
        begun = in_group(done, rank, "configured")[1]
        assert begun.outcome in (Outcome.UNSEEN, Outcome.OK), "its wait came while it was off"


def test_communication_can_be_switched_on_later(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        assert done.facts(rank)["is_off"], "nothing was tapped"
        assert [o.size_bytes for o in done.operations(rank, "off")] == [8, 8]


def test_a_reset_begins_an_attempt_with_sequences_of_its_own(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        found = [(o.sequence, o.size_bytes, o.outcome) for o in in_group(done, rank, "reset")]
        assert [number for number, *_ in found] == [0, 1, 2]
        assert found[0] == (0, 4, Outcome.OK)
        assert {outcome for _, _, outcome in found[1:]} <= {Outcome.UNFINISHED, Outcome.OK}
        second = done.operations(rank, attempt=1)
        assert [(o.sequence, o.size_bytes, o.outcome) for o in second] == [
            (0, 16, Outcome.OK), (1, 16, Outcome.OK),
        ]  # fmt: skip


def test_close_takes_every_tap_out_again(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        facts = done.facts(rank)
        assert (facts["is_tapped"], facts["is_restored"], facts["is_restored_again"]) == (
            True, True, True,
        )  # fmt: skip
        assert facts["num_errors"] == {}
        assert in_group(done, rank, "second") == []


def test_a_second_recorder_of_the_same_process_records_again(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        operations = done.operations(rank, "second")
        assert [(o.sequence, o.size_bytes) for o in operations] == [(0, 8), (1, 8), (2, 8)]
        closing = done.recording(rank, "second").closing
        assert closing is not None
        assert closing["num_errors"] == 0


def test_a_forked_child_writes_nothing_into_its_parents_files(scenarios: Path) -> None:
    done = finished(scenarios, "controls")
    for rank in done.ranks:
        assert done.facts(rank)["fork"] == {"exit_code": 0, "is_unchanged": True}
        operations = in_group(done, rank, "forked")
        assert [(o.sequence, o.outcome) for o in operations] == [
            (0, Outcome.OK), (1, Outcome.OK),
        ]  # fmt: skip
        assert 77 * 4 not in [o.size_bytes for o in done.operations(rank)]
