"""CO004 and CO005: gradients that are reduced too often, or for nothing."""

import pytest
from diagnosed import context_of

from builders import MS
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import ConfidenceLevel
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from meshscope.store.schema import OperationFlag
from timeline_builders import TimedJob

OWN = {code: RULES[code] for code in ("CO001", "CO003", "CO004", "CO005")}
GRADIENTS = 8 << 20
SUM_MS = 5


def write_run(
    path, sizes, *, replicas=None, kind=Kind.ALL_REDUCE, dtype="float32", axis="dp", waited=0.0,
    flags=0, copied_ns=0,
):  # fmt: skip
    """Steps of four microbatches of 20 ms; after each a sum of `sizes` bytes, none for 0, which
    takes `copied_ns` to be copied back.

    The training threads `waited` for cores for that share of the time.
    """
    layout = Layout(**{axis: 2})
    job = TimedJob(path, num_ranks=2, layout=layout, host=lambda rank: "node")
    group = job.group(range(2), description=f"mesh_{axis}")
    if replicas is not None:
        for writer in job.writers.values():
            writer.journal.write("update", replicas=[replicas])
    for writer in job.writers.values():
        counted = {"elapsed_ns": 1000, "run_ns": 1, "queued_ns": int(1000 * waited)}
        writer.journal.write("update", core_queue=counted)
    now = 0
    for step in range(20):
        start = now
        for microbatch, size in enumerate(sizes):
            summed_ns = SUM_MS * MS + copied_ns if copied_ns and size else 0
            for rank in range(2):
                job.phase(rank, "backward", now, now + 20 * MS + summed_ns)
            now += 20 * MS
            if size:
                fields = {rank: {"microbatch": microbatch} for rank in range(2)}
                job.collective(
                    group,
                    {0: now, 1: now},
                    transfer_ns=SUM_MS * MS,
                    kind=kind,
                    dtype=dtype,
                    step=step,
                    size_bytes=size,
                    flags=flags,
                    overrides=fields,
                )
                now += SUM_MS * MS + copied_ns + (MS if copied_ns else 0)
        for rank in range(2):
            job.own_step(rank, step, start, now)
    job.close()
    return path


def find_loud(path):
    found = diagnose(context_of(path), rules=OWN).findings
    assert all(one.code != "HE001" for one in found)
    return [one for one in found if one.severity > Severity.LOW]


def test_sums_in_every_microbatch_cost_what_all_but_one_take(tmp_path):
    (found,) = find_loud(write_run(tmp_path, [GRADIENTS] * 4))
    assert found.code == "CO004"
    assert found.title == "gradients are reduced 4 times in a step"
    assert found.saved_ns == pytest.approx(3 * SUM_MS * MS, rel=0.02)
    assert "no_sync" in found.change
    assert found.gain.basis.endswith("work of backward and not in it")


def test_what_is_copied_back_is_saved_as_well(tmp_path):
    (found,) = find_loud(write_run(tmp_path, [GRADIENTS] * 4, copied_ns=2 * MS))
    assert found.saved_ns == pytest.approx(3 * (SUM_MS + 2) * MS, rel=0.02)


@pytest.mark.parametrize(("flags", "freed"), [(OperationFlag.ENGINE, 0.75), (0, 0.0)])
def test_sums_beside_backward_leave_the_cores_they_use_to_training(tmp_path, flags, freed):
    """Three of four: so much less the training thread waits; one that blocks takes no core."""
    write_run(tmp_path, [GRADIENTS] * 4, waited=0.1, flags=flags)
    (found,) = find_loud(tmp_path)
    step_ns = 4 * (20 + SUM_MS) * MS
    saved_ns = 3 * SUM_MS * MS + freed * 0.1 * step_ns
    assert found.saved_ns == pytest.approx(saved_ns, rel=0.02)
    assert (found.confidence.level is ConfidenceLevel.MEDIUM) == bool(freed)


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ([0, 0, 0, GRADIENTS], {}),
        ([4096, 4096, 4096, GRADIENTS], {}),  # a loss for the log
        ([GRADIENTS] * 4, {"kind": Kind.REDUCE_SCATTER}),  # FSDP does so to save memory
        ([GRADIENTS] * 4, {"axis": "tp"}),  # activations
        (  # something else than the model's gradients
            [GRADIENTS // 8] * 4,
            {"replicas": {"num_parameters": 9, "parameter_bytes": GRADIENTS, "unused_bytes": 0}},
        ),
    ],
)
def test_what_is_reduced_once_or_is_no_gradient_is_left_alone(tmp_path, sizes, fields):
    assert find_loud(write_run(tmp_path, sizes, **fields)) == []


def told(unused_bytes, *, finds_unused=1):
    return {
        "num_parameters": 250,
        "parameter_bytes": GRADIENTS,
        "unused_bytes": unused_bytes,
        "finds_unused": finds_unused,
    }


def test_half_of_the_parameters_without_a_gradient_cost_half_of_the_sum(tmp_path):
    path = write_run(tmp_path, [GRADIENTS], replicas=told(GRADIENTS // 2))
    (found,) = find_loud(path)
    assert (found.code, found.title) == ("CO005", "parameters without a gradient are reduced")
    assert found.saved_ns == pytest.approx(SUM_MS * MS / 2, rel=0.02)
    assert "50 %" in found.summary


def test_few_bytes_without_a_gradient_cost_little(tmp_path):
    """4 KiB take no more than 0.4 ms of a sum, on whatever link."""
    small = {**told(4096), "parameter_bytes": 4096}
    path = write_run(tmp_path, [4096], replicas=small)
    found = diagnose(context_of(path), rules={"CO005": RULES["CO005"]}).findings
    assert [one.saved_ns for one in found] == [pytest.approx(4096 / 0.01, rel=0.02)]


def test_a_search_that_finds_nothing_costs_its_map(tmp_path):
    """1000 bytes are one number for each of 250 parameters."""
    path = write_run(tmp_path, [1000], replicas=told(0), dtype="int32")
    (found,) = find_loud(path)
    assert found.title == "unused parameters are searched for, and there are none"
    assert found.saved_ns == pytest.approx(SUM_MS * MS, rel=0.02)


@pytest.mark.parametrize("replicas", [told(0, finds_unused=0), {"num_parameters": "x"}, 7])
def test_without_the_option_nothing_is_said(tmp_path, replicas):
    assert find_loud(write_run(tmp_path, [GRADIENTS], replicas=replicas)) == []
