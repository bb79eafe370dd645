// The document of a page: the report, and what its views need beyond it.
import type { Compared } from "./compare";
import type { Hang } from "./hang";
import type { Known } from "./known";
import type { MemoryOverview } from "./memory";
import type { PackedMatrix } from "./matrix";
import type { Curve, Report, StepSpans } from "./report";

export interface RunState {
  readonly kind: "finished" | "failed" | "stuck" | "live" | "open" | "traces";
  readonly text: string;
  readonly note: string;
}

export interface Lamp {
  readonly key: string;
  readonly question: string;
  readonly state: "ok" | "attention" | "bad" | "not known";
  readonly value: string;
  readonly note: string;
  readonly rules: readonly string[];
  readonly not_run: Readonly<Record<string, string>>;
  readonly findings: readonly string[];
}

export interface Link {
  readonly view: string;
  readonly metric: string | null;
  readonly ranks: readonly number[];
  readonly steps: readonly [number, number] | null;
  readonly axis: string | null;
  readonly step: number | null;
  readonly phase: string | null;
}

export interface FindingLinks {
  readonly id: string;
  readonly code: string;
  readonly lamp: string;
  readonly cause: string | null;
  readonly links: readonly Link[];
}

export interface MeshRank {
  readonly rank: number;
  readonly coordinates: Known<Readonly<Record<string, number>>>;
  readonly label: Known<string>;
  readonly host: Known<string>;
  readonly num_peers: number;
  readonly state: Known<string>;
  readonly num_steps: number;
}

export interface Metric {
  readonly key: string;
  readonly label: string;
  readonly denial: string;
  readonly unit: string;
  readonly has_phases: boolean;
  readonly is_excess: boolean;
  /** Why the run has none; null where it has. */
  readonly reason: string | null;
}

export interface PageEvent {
  readonly kind: string;
  readonly step: number;
  readonly last_step: number;
  readonly ranks: readonly number[];
  readonly label: string;
  readonly finding: string | null;
}

/** Budget by step: per rank and step, in columns of consecutive steps. */
export interface StepBudget {
  /** Names, as in the report's budget. */
  readonly lines: readonly string[];
  readonly step_edges: readonly number[];
  readonly num_steps: readonly number[];
  /** [line][column] */
  readonly mean_ns: readonly (readonly number[])[];
  readonly wall_ns: readonly number[];
  readonly highest_wall_ns: readonly number[];
  /** By line, [rank, step]; empty where that is too large. */
  readonly cells: readonly PackedMatrix[];
}

export interface LeftOut {
  readonly first_step: number;
  readonly last_step: number;
  readonly reason: string;
}

export interface Matrices {
  readonly metrics: readonly Metric[];
  readonly phases: readonly string[];
  readonly left_out: readonly LeftOut[];
  readonly layers: readonly PackedMatrix[];
  readonly parts: readonly PackedMatrix[];
}

export interface RuleFacts {
  readonly code: string;
  readonly name: string;
  readonly subject: string;
  readonly lamp: string;
  readonly reason: string | null;
  readonly num_findings: number;
}

export interface Timeline extends StepSpans {
  readonly picked: readonly string[];
}

export interface WaitingRank {
  readonly rank: number;
  readonly parent: number | null;
  readonly depth: number;
  readonly label: string;
  readonly host: string;
  readonly operation: string;
  readonly waited_ns: number | null;
  readonly waits_for: readonly number[];
  readonly is_certain: boolean;
  readonly is_culprit: boolean;
}

export interface ComparedRun {
  readonly name: string;
  readonly report: Report;
  readonly ranks: readonly MeshRank[];
  readonly matrices: Matrices;
  readonly series: readonly Curve[];
}

export interface PageDocument {
  readonly document: string;
  readonly document_version: number;
  readonly meta: {
    readonly kind: "run" | "hang" | "compare";
    readonly title: string;
    readonly meshscope_version: string;
    readonly made_unix_ns: number;
    readonly is_from_traces: boolean;
    readonly state: RunState | null;
    readonly is_redacted: boolean;
    readonly left_out: readonly string[];
  };
  readonly verdict: { readonly tone: "bad" | "attention" | "ok" | "not known"; readonly title: string; readonly text: string; readonly finding: string | null };
  readonly lamps: readonly Lamp[];
  readonly report: Report | null;
  readonly ranks: readonly MeshRank[];
  readonly findings: readonly FindingLinks[];
  readonly rules: readonly RuleFacts[];
  readonly matrices: Matrices | null;
  readonly budget_steps: Known<StepBudget>;
  readonly timelines: readonly Timeline[];
  readonly series: readonly Curve[];
  readonly events: readonly PageEvent[];
  readonly memory: Known<MemoryOverview>;
  readonly hang: (Hang & { readonly tree: readonly WaitingRank[] }) | null;
  readonly compare: { readonly found: Compared; readonly a: ComparedRun; readonly b: ComparedRun } | null;
}

/** A page of one run, stuck or not: it has a report. */
export type RunPage = PageDocument & { readonly report: Report };
