"""The list of all rules: code to class. A code is never reused, not even when its rule is gone."""

from collections.abc import Mapping

from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules import (
    compute,
    convergence,
    device_idle,
    few_steps,
    health,
    imbalance,
    input_stalls,
    loss_rises,
    lost_time,
    memory,
    microbatches,
    out_of_memory,
    pauses,
    pipeline,
    step_time,
    stragglers,
)
from meshscope.diagnose.rules.communication import gradients, transfers
from meshscope.diagnose.rules.hardware import cores, devices, links

RULES: dict[str, type[Rule]] = {
    "HE001": health.RuleFailed,
    "HE002": health.RankStopped,
    "HE003": health.RecordingDamaged,
    "HE004": health.ClocksApart,
    "HE005": health.RecorderCost,
    "HE006": health.Desynchronised,
    "HE007": health.ReplayRefused,
    "HE008": health.PartOfTheSteps,
    "ST001": stragglers.SlowRankRule,
    "ST002": stragglers.SlowSetRule,
    "ST003": stragglers.FailSlowRule,
    "ST004": stragglers.UnevenLoadRule,
    "ST005": few_steps.SlowInFewSteps,
    "IM001": imbalance.SequenceLengthRule,
    "PA001": pauses.GarbageCollectionRule,
    "PA002": pauses.HostPauseRule,
    "IN001": input_stalls.SlowLoader,
    "IN002": input_stalls.InputBound,
    "PP001": microbatches.TooFewMicrobatches,
    "PP002": pipeline.UnevenStages,
    "PP003": pipeline.SlowStage,
    "PP004": pipeline.SlowHandovers,
    "LK001": links.SlowLinkRule,
    "CO001": transfers.ExposedDataParallel,
    "CO002": transfers.ExposedTensorParallel,
    "CO003": transfers.SmallOperations,
    "CO004": gradients.ReducedTooOften,
    "CO005": gradients.UnusedParameters,
    "CP001": compute.BackwardHeavy,
    "CP002": compute.OptimizerHeavy,
    "CP003": compute.LowUtilisation,
    "CP004": compute.HostGap,
    "CP005": device_idle.HostSynchronises,
    "CP006": device_idle.ExposedCopies,
    "CP007": compute.Recompilation,
    "ME001": memory.MemoryLeak,
    "ME002": memory.NearCapacity,
    "ME003": memory.Fragmentation,
    "ME004": memory.MemorySkew,
    "ME005": memory.AllocatorRetries,
    "ME006": out_of_memory.OutOfMemory,
    "CV001": convergence.LossNotFinite,
    "CV002": convergence.LossDiverged,
    "CV003": convergence.LossPlateau,
    "CV004": convergence.LossSpikes,
    "CV005": convergence.GradientNorm,
    "CV006": convergence.JointDisturbances,
    "CV007": convergence.SkippedSteps,
    "CV008": loss_rises.LossRises,
    "TI001": step_time.StepTimeDrift,
    "TI002": step_time.PeriodicSlowSteps,
    "TI003": step_time.LongWarmup,
    "TI004": step_time.SlowStepsOnAllRanks,
    "HW001": devices.ThrottledDevice,
    "HW002": devices.DeviceErrors,
    "HW003": cores.TooManyThreads,
    "TI005": input_stalls.WorkBetweenSteps,
    "LT001": lost_time.UnnamedLoss,
}


def list_thresholds(rules: Mapping[str, type[Rule]] = RULES) -> tuple[Threshold, ...]:
    """Every limit of every rule, once, in the order of the rules."""
    found = {threshold.name: threshold for rule in rules.values() for threshold in rule.thresholds}
    return tuple(found.values())
