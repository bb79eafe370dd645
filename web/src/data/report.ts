// The parts of `meshscope report --json` that the page shows. Anything may be missing: see known.ts.
import type { Known } from "./known";

export interface RankRange {
  readonly first: number;
  readonly last: number;
}

export interface Evidence {
  readonly name: string;
  readonly value: number | string;
  readonly unit: string;
}

/** Where a view shows what a finding is about. */
export interface EvidenceLink {
  readonly view: string;
  readonly metric?: string | null;
  readonly ranks?: readonly RankRange[] | readonly number[] | null;
  readonly steps?: readonly number[] | null;
  readonly axis?: string | null;
  readonly step?: number | null;
  readonly phase?: string | null;
}

export interface Finding {
  readonly id?: string;
  readonly code: string;
  readonly name: string;
  readonly title: string;
  readonly severity: string;
  readonly summary: string;
  readonly ranks: readonly RankRange[];
  readonly first_step: number | null;
  readonly last_step: number | null;
  readonly onset?: Known<{ readonly step: number; readonly start_unix_ns: Known<number>; readonly course: "always" | "since" | "at times"; readonly is_over?: boolean }>;
  readonly evidence: readonly Evidence[];
  readonly confidence: { readonly level: string; readonly text: string; readonly p_value: Known<number> };
  readonly change: string;
  readonly explained_by: string | null;
  readonly saved_ns: Known<number>;
  readonly saved_ratio: Known<number>;
  readonly step_ns: Known<number>;
  readonly price_basis: Known<string>;
  readonly links?: readonly EvidenceLink[];
}

export interface SilentRule {
  readonly code: string;
  readonly reason: Known<string>;
}

export interface Diagnosis {
  readonly findings: readonly Finding[];
  readonly rules: readonly string[];
  readonly not_run?: Known<readonly SilentRule[]>;
  readonly step_ns: Known<number>;
  readonly replay_error_ratio: Known<number>;
  readonly worst_severity: Known<string>;
}

export interface BudgetLine {
  readonly name: string;
  readonly share: string;
  readonly axis: string;
  readonly mean_ns: number;
  readonly ratio: number;
  readonly note: string;
}

export interface Budget {
  readonly num_steps: number;
  readonly num_left_out: number;
  readonly mean_wall_ns: number;
  readonly lines: readonly BudgetLine[];
  readonly residual_mean_ns: number;
  readonly mfu: Known<number | { readonly ratio: number }>;
  readonly ranks: readonly { readonly rank: number; readonly wall_ns: number; readonly time_ns: readonly number[]; readonly residual_ns: number }[];
}

export interface Stage {
  readonly stage: number;
  readonly ranks: readonly RankRange[];
  readonly forward_ns: Known<number>;
  readonly backward_ns: Known<number>;
  readonly num_layers: Known<number>;
  readonly extras: Known<readonly string[]>;
  readonly bubble_ratio: Known<number>;
}

export interface Pipeline {
  readonly num_pipelines: number;
  readonly cost_ns: Known<number>;
  readonly bubble_ratio: Known<number>;
  readonly executed_ratio: Known<number>;
  readonly balanced_ratio: Known<number>;
  readonly closed_form_ratio: Known<number>;
  readonly closed_form: Known<string>;
  readonly schedule: Known<string>;
  readonly num_stages: number;
  readonly num_microbatches: Known<number>;
  readonly parts_ns: Known<Readonly<Record<string, Known<number>>>>;
  readonly replay_error_ratio: Known<number>;
  readonly stages: readonly Stage[];
}

export interface Exposure {
  readonly wait_ns: number;
  readonly transfer_ns: number;
  readonly exposed_ns: number;
  readonly exposed_wait_ns: number;
  readonly exposed_transfer_ns: number;
  readonly exposed_unsplit_ns: number;
  readonly overlapped_ns: number;
  readonly exposed_ratio: Known<number>;
}

export interface OperationTotal {
  readonly num_operations: number;
  readonly size_bytes: number;
}

export interface Bandwidth {
  readonly axis: string;
  readonly kind: string;
  readonly num_ranks: number;
  readonly is_across_hosts: boolean;
  readonly num_operations: number;
  readonly num_samples: number;
  readonly median_size_bytes: number;
  readonly median_transfer_ns: number;
  readonly bus_bytes_per_s: Known<number>;
  readonly p10_bus_bytes_per_s?: Known<number>;
  readonly p90_bus_bytes_per_s?: Known<number>;
}

export interface BandwidthFit {
  readonly axis: string;
  readonly kind: string;
  readonly num_ranks: number;
  readonly is_across_hosts: boolean;
  readonly reason?: Known<unknown>;
  readonly latency_ns?: Known<number>;
  readonly latency_low_ns?: Known<number>;
  readonly latency_high_ns?: Known<number>;
  readonly bus_bytes_per_s?: Known<number>;
}

export interface Message {
  readonly source: number;
  readonly target: number;
  readonly num_messages: number;
  readonly size_bytes: number;
  readonly is_across_hosts: boolean;
  readonly mean_latency_ns: Known<number>;
  readonly mean_wait_ns: Known<number>;
}

export interface LastArriver {
  readonly axis: string;
  readonly rank: number;
  readonly num_last: number;
  readonly num_operations: number;
  readonly expected_last: number;
  readonly is_beyond_chance: boolean;
  readonly cost_ns: number;
  readonly caused_wait_ns: number;
  readonly phase: string;
}

export interface SlowOperation {
  readonly kind: string;
  readonly group: { readonly name: string; readonly description: string; readonly axis: string; readonly ranks: readonly RankRange[] };
  readonly sequence: number;
  readonly size_bytes: number;
  readonly step: Known<number>;
  readonly phase: string;
  readonly total_ns: number;
  readonly wait_ns: number;
  readonly max_transfer_ns: number;
  readonly last_rank: Known<number>;
}

export interface Clock {
  readonly host?: string;
  readonly offset_ns?: Known<number>;
  readonly uncertainty_ns?: Known<number>;
  readonly drift_ppm?: Known<number>;
}

export interface Communication {
  readonly clocks: readonly Clock[];
  readonly bandwidth: readonly Bandwidth[];
  readonly fits: readonly BandwidthFit[];
  readonly messages: readonly Message[];
  readonly last_arrivers: readonly LastArriver[];
  readonly slowest: readonly SlowOperation[];
  readonly health: Readonly<Record<string, unknown>>;
  readonly axes: readonly { readonly axis: string; readonly num_groups: number; readonly total: OperationTotal; readonly per_rank_step: Exposure }[];
  readonly kinds: readonly { readonly axis: string; readonly kind: string; readonly total: OperationTotal; readonly per_rank_step: Exposure }[];
  readonly num_message_pairs: number;
}

export interface StepTimes {
  readonly count: number;
  readonly mean_ns: number;
  readonly median_ns: number;
  readonly p95_ns: number;
  readonly max_ns: number;
}

export interface RankFacts {
  readonly rank: number;
  readonly label: Known<string>;
  readonly host: Known<string>;
  readonly num_steps: number;
  readonly state: Known<string>;
  readonly step_time: Known<StepTimes>;
  readonly peak_rss_bytes: Known<number>;
  readonly peak_device_bytes: Known<number>;
  readonly last_step: Known<number>;
  readonly num_errors: number;
  readonly num_problems: number;
  readonly coordinates?: Known<Readonly<Record<string, number>>>;
}

export interface Signal {
  readonly name: string;
  readonly first: Known<number>;
  readonly last: Known<number>;
  readonly last_step: Known<number>;
  readonly num_nonfinite: number;
}

export interface MemoryRank {
  readonly rank: number;
  readonly place: string;
  readonly host: string;
  readonly peak_bytes: Known<number>;
  readonly peak_step?: number;
  readonly first_step?: number;
  readonly parts_bytes?: Readonly<Record<"parameters" | "other_at_start" | "added_later" | "within_steps", number>>;
  readonly limit_bytes: Known<number>;
}

export interface CheckedTime {
  readonly name: string;
  readonly predicted_ns: number;
  readonly measured_ns: number;
}

/** What was predicted before the run, against it. */
export interface Prediction {
  readonly step: Known<CheckedTime>;
  readonly is_within: Known<boolean>;
  readonly interval_ratio: Known<number>;
  readonly calibrated_on: Known<string>;
  readonly lines: readonly CheckedTime[];
  readonly memory: readonly { readonly pp_rank: number; readonly predicted_bytes: number; readonly measured_bytes: Known<number> }[];
}

export interface Report {
  readonly document: string;
  readonly meshscope_version: string;
  readonly run: {
    readonly path: Known<string>;
    readonly run_id: Known<string>;
    readonly attempt: number;
    readonly num_attempts: number;
    readonly started_unix_ns: Known<number>;
    readonly world_size: Known<number>;
    readonly num_ranks: number;
    readonly hosts: readonly { readonly host: string; readonly num_ranks: number }[];
    readonly argv: Known<readonly string[]>;
    readonly torch_version: Known<string>;
    readonly device_name: Known<string>;
    readonly git_revision: Known<string>;
  };
  readonly diagnosis: Known<Diagnosis>;
  readonly budget: Known<Budget>;
  readonly pipeline: Known<Pipeline>;
  readonly layout: Known<{ readonly text: string; readonly degrees: Readonly<Record<string, number>>; readonly source: Known<string> }>;
  readonly steps: { readonly num_steps: number; readonly num_partial: number; readonly num_warmup: number; readonly num_profiled: number;
    readonly time: Known<StepTimes>; readonly interval: Known<StepTimes> };
  readonly steps_per_s: Known<number>;
  readonly tokens: Known<{ readonly tokens_per_s: Known<number> }>;
  readonly samples: Known<{ readonly samples_per_s?: Known<number> }>;
  readonly signals: Known<Readonly<Record<string, Known<Signal>>>>;
  readonly communication: Known<Communication>;
  readonly ranks: readonly RankFacts[];
  readonly memory: Known<{ readonly ranks: readonly MemoryRank[] }>;
  readonly hardware: Known<unknown>;
  readonly prediction?: Known<Prediction>;
  readonly health: Known<{
    readonly errors: readonly unknown[]; readonly notes: readonly unknown[]; readonly num_dropped: Known<number>;
    readonly missing_ranks: readonly (RankRange | number)[]; readonly short_ranks: readonly unknown[];
    readonly unfinished_ranks: readonly unknown[]; readonly is_complete: boolean; readonly num_missing_ranks: number;
    readonly problems: readonly unknown[];
    readonly overhead: Known<{ readonly median_ns: number; readonly median_ratio: number; readonly p95_ratio: number; readonly lost_ratio: Known<number> }>;
  }>;
}

export interface Curve {
  readonly key: string;
  readonly group: string;
  readonly unit: string;
  readonly source: string;
  readonly num_values: number;
  readonly step: readonly number[];
  readonly low: readonly (number | null)[];
  readonly mean: readonly (number | null)[];
  readonly high: readonly (number | null)[];
  readonly is_of_ranks: boolean;
  readonly bad_steps: readonly number[];
}

export interface StepSpans {
  readonly step: number;
  readonly origin_ns: number;
  readonly length_ns: number;
  readonly ranks: readonly number[];
  readonly num_ranks: number;
  readonly period_start_ns: readonly number[];
  readonly step_start_ns: readonly number[];
  readonly period_end_ns: readonly number[];
  readonly clock_uncertainty_ns: readonly Known<number>[];
  readonly on_device: readonly boolean[];
  readonly merged_below_ns: number;
  readonly lines: readonly { readonly share: string; readonly axis: string }[];
  readonly phases: readonly string[];
  readonly action_kinds: readonly string[];
  readonly pieces: {
    readonly rank: readonly number[]; readonly start_ns: readonly number[]; readonly duration_ns: readonly number[];
    readonly line: readonly number[]; readonly phase: readonly number[]; readonly action: readonly number[];
    readonly operation: readonly number[]; readonly is_between: readonly number[];
  };
  readonly actions: {
    readonly rank: readonly number[]; readonly start_ns: readonly number[]; readonly duration_ns: readonly number[];
    readonly kind: readonly number[]; readonly stage: readonly number[]; readonly chunk: readonly number[];
    readonly microbatch: readonly number[]; readonly wait_start_ns: readonly number[]; readonly wait_ns: readonly number[];
  } | null;
  readonly operations: {
    readonly kind: readonly string[]; readonly axis: readonly string[]; readonly group: readonly string[];
    readonly size_bytes: readonly number[]; readonly match: readonly number[];
  };
}
