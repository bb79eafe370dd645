import pytest

from meshscope.core.placement import (
    LaunchIdentity,
    NoPlacement,
    Placement,
    launch_identity,
    placement_from_environment,
)
from meshscope.errors import LayoutError

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}

TORCHRUN_PLACEMENT = Placement(
    rank=11,
    world_size=16,
    local_rank=3,
    local_world_size=8,
    node_rank=1,
    source="torchrun environment (RANK, WORLD_SIZE)",
)


class TestPlacement:
    def test_torchrun(self):
        assert placement_from_environment(TORCHRUN) == TORCHRUN_PLACEMENT

    def test_rank_and_world_size_alone_leave_the_node_unknown(self):
        assert placement_from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == Placement(
            rank=0,
            world_size=1,
            local_rank=None,
            local_world_size=None,
            node_rank=None,
            source="torchrun environment (RANK, WORLD_SIZE)",
        )

    def test_torchrun_inside_other_launchers_wins(self):
        env = SRUN | OPEN_MPI | {"PMI_RANK": "0", "PMI_SIZE": "2"} | TORCHRUN
        assert placement_from_environment(env) == TORCHRUN_PLACEMENT

    def test_srun_step(self):
        assert placement_from_environment(SRUN | OPEN_MPI) == Placement(
            rank=5,
            world_size=8,
            local_rank=1,
            local_world_size=None,
            node_rank=1,
            source="Slurm environment (SLURM_PROCID, SLURM_NTASKS)",
        )

    # 4294967290 is the step id of salloc's interactive shell, 4294967291 of the batch script.
    @pytest.mark.parametrize(
        "step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}]
    )
    def test_a_batch_script_or_interactive_shell_is_no_slurm_rank(self, step: dict[str, str]):
        env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"} | step
        placement = placement_from_environment(env)
        assert isinstance(placement, NoPlacement)
        assert "this is not an srun step" in placement.reason

    def test_mpirun_inside_a_batch_script_is_read_from_mpi(self):
        env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"} | OPEN_MPI
        # The node rank of Open MPI is a rank within the node, so the node stays unknown.
        assert placement_from_environment(env) == Placement(
            rank=5,
            world_size=8,
            local_rank=1,
            local_world_size=4,
            node_rank=None,
            source="Open MPI environment (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
        )

    def test_pmi(self):
        assert placement_from_environment({"PMI_RANK": "1", "PMI_SIZE": "2"}) == Placement(
            rank=1,
            world_size=2,
            local_rank=None,
            local_world_size=None,
            node_rank=None,
            source="PMI environment (PMI_RANK, PMI_SIZE)",
        )

    def test_a_local_rank_alone_is_never_the_rank(self):
        placement = placement_from_environment({"LOCAL_RANK": "3", "WORLD_SIZE": "16"})
        assert isinstance(placement, NoPlacement)
        assert "a local rank repeats on every node" in placement.reason

    def test_an_empty_environment_has_no_rank(self):
        placement = placement_from_environment({})
        assert isinstance(placement, NoPlacement)
        assert placement.reason.startswith("none of RANK, SLURM_PROCID")

    @pytest.mark.parametrize(
        ("env", "complaints"),
        [
            ({"RANK": "3"}, ["RANK is '3' but WORLD_SIZE is not set"]),
            ({"RANK": "8", "WORLD_SIZE": "8"}, ["RANK is 8, but with WORLD_SIZE=8"]),
            ({"RANK": "0", "WORLD_SIZE": "0"}, ["RANK is 0, but with WORLD_SIZE=0"]),
            ({"RANK": "-1", "WORLD_SIZE": "8"}, ["RANK is '-1', but a whole number"]),
            ({"RANK": "", "WORLD_SIZE": "8"}, ["RANK is ''"]),
            ({"RANK": "one", "WORLD_SIZE": "1.5"}, ["RANK is 'one'", "WORLD_SIZE is '1.5'"]),
            (TORCHRUN | {"LOCAL_RANK": "8"}, ["LOCAL_RANK is 8, but with LOCAL_WORLD_SIZE=8"]),
            (TORCHRUN | {"RANK": "16", "GROUP_RANK": "x"}, ["RANK is 16", "GROUP_RANK is 'x'"]),
            ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, ["SLURM_NTASKS is not set"]),
        ],
    )
    def test_variables_that_contradict_themselves_are_refused(
        self, env: dict[str, str], complaints: list[str]
    ):
        with pytest.raises(LayoutError) as caught:
            placement_from_environment(env)
        for complaint in complaints:
            assert complaint in str(caught.value)


class TestLaunchIdentity:
    @pytest.mark.parametrize(
        ("env", "expected"),
        [
            ({}, (None, 0, "no launcher variable is set")),
            (
                {"MESHSCOPE_LAUNCH_ID": "mine", "TORCHELASTIC_RUN_ID": "r1", "SLURM_JOB_ID": "7"},
                ("mine", 0, "MESHSCOPE_LAUNCH_ID"),
            ),
            (
                {"MESHSCOPE_LAUNCH_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2"},
                ("mine", 2, "MESHSCOPE_LAUNCH_ID, TORCHELASTIC_RESTART_COUNT"),
            ),
            (
                {"TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_RESTART_COUNT": "1"},
                ("r1", 1, "TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT"),
            ),
            (
                {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
                (None, 1, "TORCHELASTIC_RESTART_COUNT"),
            ),
            (
                {
                    "TORCHELASTIC_RUN_ID": "none",
                    "TORCHELASTIC_RESTART_COUNT": "1",
                    "SLURM_JOB_ID": "7",
                    "SLURM_RESTART_COUNT": "3",
                },
                ("7", 1, "SLURM_JOB_ID, TORCHELASTIC_RESTART_COUNT"),
            ),
            (
                {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3", "PMIX_NAMESPACE": "n"},
                ("7", 3, "SLURM_JOB_ID, SLURM_RESTART_COUNT"),
            ),
            ({"PMIX_NAMESPACE": "prterun-a-1@1"}, ("prterun-a-1@1", 0, "PMIX_NAMESPACE")),
            ({"MESHSCOPE_LAUNCH_ID": " ", "SLURM_JOB_ID": "7"}, ("7", 0, "SLURM_JOB_ID")),
        ],
    )
    def test_the_first_launcher_that_names_the_launch_is_taken(
        self, env: dict[str, str], expected: tuple[str | None, int, str]
    ):
        launch_id, restart_count, source = expected
        assert launch_identity(env) == LaunchIdentity(
            launch_id=launch_id, restart_count=restart_count, source=source
        )

    def test_a_restart_count_that_is_no_count_is_refused(self):
        with pytest.raises(LayoutError, match="TORCHELASTIC_RESTART_COUNT is 'x'"):
            launch_identity({"TORCHELASTIC_RESTART_COUNT": "x"})
