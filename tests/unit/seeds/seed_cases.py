"""Every case in which the systems behind the founding documents were seen to fail, and our test.

    .venv/bin/python tests/unit/seeds/seed_cases.py      writes docs/seed-defects.md

A case names the test that shows what meshscope does instead; `test_seed_cases.py` checks that the
test exists and that the page is current.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "seed-defects.md"

HERE = "tests/unit/seeds/test_seed_defects.py"
MONITOR = "tests/unit/capture/test_monitor.py"
AUTOMATIC = "tests/unit/capture/test_automatic.py"
COUNTING = "tests/unit/capture/test_flop_counting.py"
HARDWARE = "tests/unit/core/test_hardware.py"
FLOPS = "tests/unit/core/test_flops.py"
LAYOUT = "tests/unit/core/test_layout.py"
PLACEMENT = "tests/unit/core/test_placement.py"
REPLAY = "tests/unit/core/test_schedule_replay.py"
PROBLEMS = "tests/unit/engine/test_config_problems.py"
READER = "tests/unit/store/test_reader.py"
JOURNAL = "tests/unit/store/test_journal.py"
STORE = "tests/property/test_store_properties.py"
MATRIX = "tests/distributed/test_fault_matrix.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCase:
    """One defect that was seen by running the system."""

    system: str
    defect: str
    instead: str
    tests: tuple[str, ...]
    """`path::name`."""


def _case(system: str, defect: str, instead: str, *tests: str) -> SeedCase:
    return SeedCase(system=system, defect=defect, instead=instead, tests=tests)


MONITOR_3D = "torsh, 3D monitor"
ENGINE_3D = "torsh, 3D engine"
PYTSCOPE = "pytscope"

CASES: tuple[SeedCase, ...] = (
    _case(
        MONITOR_3D,
        "analysis and report deadlock for any dp > 1",
        "answers come from a snapshot; every shape of layout is tested, and other threads",
        f"{MONITOR}::test_every_shape_of_layout_has_a_report_from_the_first_moment_on",
        f"{MONITOR}::test_the_recorder_answers_while_other_threads_record",
    ),
    _case(
        MONITOR_3D,
        "a fresh monitor reports a pipeline at 0 %, with pp = 1",
        "no data, no verdict; without a pipeline its utilisation is not available",
        f"{MONITOR}::test_a_fresh_monitor_says_nothing_at_all",
        f"{MONITOR}::test_few_steps_give_numbers_but_no_verdict",
    ),
    _case(
        MONITOR_3D,
        "1 µs of tp traffic in 3 s scores 12.5 % tp efficiency; 100 s of sends lift it to 100 %",
        "1 − exposed communication over tp, of the step",
        f"{MONITOR}::test_tp_efficiency_is_of_the_step_whatever_else_is_sent",
        f"{MONITOR}::test_tp_traffic_that_takes_half_the_step_halves_the_efficiency",
    ),
    _case(
        ENGINE_3D,
        "ranks of 2×2×2 with pp fastest",
        "the same order can be chosen, and gives the same coordinates; tp is fastest by default",
        f"{LAYOUT}::test_order_with_pp_fastest_can_be_chosen",
        f"{LAYOUT}::test_default_order_puts_tp_neighbours_on_consecutive_ranks",
    ),
    _case(
        ENGINE_3D,
        "the default configuration needs 110,592 MB of a cap of 8 GB and passes validation",
        "memory is estimated in closed form and compared with the cap and the device",
        f"{PROBLEMS}::test_a_model_that_does_not_fit_its_cap_is_refused_with_its_worst_rank",
        f"{PROBLEMS}::test_so_is_one_that_does_not_fit_the_device",
    ),
    _case(
        ENGINE_3D,
        "pp = 0 panics; rank 8 of 8 is given dp 2",
        "every degree and rank that is wrong is named, all at once",
        f"{LAYOUT}::test_every_bad_degree_and_order_entry_is_named_at_once",
        f"{LAYOUT}::test_a_rank_outside_the_world_is_refused",
    ),
    _case(
        PYTSCOPE,
        "a straggler of 20 ms under DistributedDataParallel has z = −0.1, and backward is blamed",
        "arrivals separate waiting from work: the injected rank is named and priced",
        f"{MATRIX}::test_the_fault_is_named_and_priced_and_nothing_else_is",
    ),
    _case(
        PYTSCOPE,
        "false stragglers: 99.8 % of runs at N=16, S=1; 34.5 % at N=64, S=5; 17 % at N=64, S=20",
        "exact tail, corrected for ranks, with an effect size and a least number of steps",
        f"{HERE}::test_noise_makes_no_straggler",
    ),
    _case(
        PYTSCOPE,
        "one of two ranks that is 10 % slow scores 4.8 % and is missed",
        "compared with the median of the others",
        f"{HERE}::test_one_of_two_ranks_is_compared_with_the_other",
    ),
    _case(
        PYTSCOPE,
        "two slow ranks of eight: no finding",
        "sets of slow ranks are found",
        f"{HERE}::test_two_slow_ranks_of_eight_do_not_hide_each_other",
    ),
    _case(
        PYTSCOPE,
        "a fast rank's wait counts as communication: 4.8 % reported as 35.5 %, 21 ms as 31 ms",
        "transfer begins when the last rank has arrived; what comes before is wait",
        f"{HERE}::test_waiting_for_a_late_rank_is_not_communication",
        "tests/unit/analyze/test_communication_analysis.py"
        "::test_a_late_rank_makes_the_others_wait_and_changes_no_transfer",
    ),
    _case(
        PYTSCOPE,
        "the budget leaves out what no mark claims: 219 ms reported as 63 ms",
        "lines add up to the wall clock in integers; what has no name has a line",
        f"{HERE}::test_unmarked_time_is_in_the_budget",
    ),
    _case(
        PYTSCOPE,
        "phases with custom names vanish: 2.0 s reported as 0.2 s",
        "any name counts",
        f"{HERE}::test_phases_with_names_of_ones_own_are_in_the_budget",
    ),
    _case(
        PYTSCOPE,
        "communication in forward counts twice and is taken from backward (20 + 30 ms: 21, 21, 10)",
        "it belongs to the phase it was in, once",
        f"{HERE}::test_communication_in_forward_is_counted_once_and_takes_nothing_from_backward",
    ),
    _case(
        PYTSCOPE,
        "everything between two steps is data: 89 % and a high finding without any loader",
        "the loader is timed; the rest is a gap",
        f"{AUTOMATIC}::test_code_between_steps_is_a_gap_and_never_data",
    ),
    _case(
        PYTSCOPE,
        "with gradient accumulation the loader's time of later microbatches goes to backward",
        "every microbatch keeps its phases",
        f"{AUTOMATIC}::test_gradient_accumulation_keeps_every_microbatch_in_its_phase",
    ),
    _case(
        PYTSCOPE,
        "evaluation between steps is charged to the next backward and leaves a phantom step",
        "evaluation is a phase of its own and begins no step",
        f"{AUTOMATIC}::test_evaluation_between_steps_is_a_gap_and_its_own_phase",
    ),
    _case(
        PYTSCOPE,
        "with its profiler on, making a learning-rate scheduler raises",
        "optimizers are watched by torch's own hooks; nothing is replaced",
        f"{AUTOMATIC}::test_a_scheduler_built_after_attaching_works_and_is_followed",
    ),
    _case(
        PYTSCOPE,
        "L40 and L40S have the peak of an L4, T400 that of a T4",
        "names are looked up whole; what is not known is not available",
        f"{HARDWARE}::test_dense_peaks_of_known_devices",
        f"{HARDWARE}::test_what_only_resembles_a_known_name_is_unavailable",
    ),
    _case(
        PYTSCOPE,
        "FLOPs are one forward times three; models with keywords only have none; a failure leaves "
        "the model in eval mode",
        "a real forward and backward on fake tensors, recomputation apart; nothing is changed",
        f"{COUNTING}::test_forward_and_backward_are_counted",
        f"{COUNTING}::test_what_is_computed_again_is_counted_apart",
        f"{COUNTING}::test_a_model_may_take_keywords_only",
        f"{COUNTING}::test_a_count_that_fails_leaves_no_trace_either",
    ),
    _case(
        PYTSCOPE,
        "MFU is clamped, so that wrong FLOPs or peaks do not show",
        "shown as it is and flagged above 1",
        f"{FLOPS}::test_more_than_the_peak_is_said_and_not_clamped",
        f"{MONITOR}::test_mfu_is_of_the_steps_wall_clock_and_not_clamped",
    ),
    _case(
        PYTSCOPE,
        "a one-off jump of 2 GB is a leak, high",
        "growth is looked for within windows of the run: a jump is not a leak",
        f"{HERE}::test_a_one_off_jump_of_two_gib_is_no_leak",
    ),
    _case(
        PYTSCOPE,
        "a leak of 0.5 MB per step is silent, 10 GB in 20,000 steps",
        "slope and chance decide, not a size per step",
        f"{HERE}::test_half_a_mib_per_step_is_a_leak",
    ),
    _case(
        PYTSCOPE,
        "a loss that is flat for the last half is improving",
        "trend of the last half, with its interval",
        f"{HERE}::test_a_loss_that_is_flat_for_half_the_run_is_not_improving",
    ),
    _case(
        PYTSCOPE,
        "a bump of 1e-6 on noise of 1e-9 is a spike",
        "a spike needs an effect, too",
        f"{HERE}::test_a_bump_of_a_millionth_is_no_spike",
    ),
    _case(
        PYTSCOPE,
        "false spikes in 0.14 %, 0.64 % and 2.9 % of steps (normal, lognormal, exponential noise)",
        "robust score on the logarithms of positive series",
        f"{HERE}::test_noise_is_hardly_ever_a_spike",
    ),
    _case(
        PYTSCOPE,
        "an infinite loss crashes the analysis",
        "it is a finding",
        f"{HERE}::test_a_loss_that_is_not_finite_is_reported",
    ),
    _case(
        PYTSCOPE,
        "one glyph per step: 5,000 steps print a line of 15 kB",
        "binned to the width of the terminal",
        f"{HERE}::test_five_thousand_steps_fit_the_width_of_a_terminal",
    ),
    _case(
        PYTSCOPE,
        "a comparison of runs without a loss claims nondeterminism",
        "without a loss there is no statement about it",
        f"{HERE}::test_runs_without_a_loss_are_not_called_nondeterministic",
    ),
    _case(
        PYTSCOPE,
        "the first divergence is a list index: step 15 reported as 5",
        "matched by step",
        f"{HERE}::test_the_first_divergence_is_named_by_its_step",
    ),
    _case(
        PYTSCOPE,
        "in traces GPU 1 hides communication of GPU 0, copies hide it too, SendRecv is “other”",
        "per device; copies are a class of their own; kinds by name and arguments",
        f"{HERE}::test_devices_of_a_trace_do_not_hide_each_others_communication",
    ),
    _case(
        PYTSCOPE,
        "overlapping pipeline intervals count twice",
        "busy time is a union",
        f"{MONITOR}::test_actions_that_overlap_are_not_busy_twice",
    ),
    _case(
        PYTSCOPE,
        "GPipe with 4 stages and 8 microbatches has a bubble of 3/11 (right there, and here)",
        "the replay of a schedule gives it for any times",
        f"{REPLAY}::test_whole_stages",
    ),
    _case(
        PYTSCOPE,
        "a second run into the same directory appends: 38 steps become 76",
        "every launch is a separate attempt",
        f"{READER}::test_a_restart_is_an_attempt_of_its_own",
        f"{READER}::test_one_after_the_other_under_one_launch_id_are_two_attempts",
    ),
    _case(
        PYTSCOPE,
        "a line without its step is a KeyError",
        "any bytes are read without an error, and what is damaged is named",
        f"{JOURNAL}::test_hostile_lines_with_right_checksums_are_left_out",
        f"{STORE}::test_any_bytes_at_all_are_read_without_an_error",
    ),
    _case(
        PYTSCOPE,
        "LOCAL_RANK comes before SLURM_PROCID: nodes collide",
        "a local rank alone is never the rank",
        f"{PLACEMENT}::test_a_local_rank_alone_is_never_the_rank",
        f"{PLACEMENT}::test_srun_step",
    ),
    _case(
        PYTSCOPE,
        "3 µs per step are claimed, 7.6 µs were measured",
        "overhead is measured beside it in one run and committed with its machine",
        "benchmarks/recorder_overhead.py::measure",
    ),
)


def function_names_in(path: Path) -> set[str]:
    """Names of the functions in a file, methods included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def render_page() -> str:
    """The page in docs."""
    lines = [
        "# Defects of the founding systems, and what is done instead",
        "",
        "Defects that were seen by running the systems behind the founding documents. Each has a "
        "test here. Generated by `tests/unit/seeds/seed_cases.py`; a test checks it.",
        "",
        "| system | was seen | meshscope | test |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        tests = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in case.tests)
        lines.append(f"| {case.system} | {case.defect} | {case.instead} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
