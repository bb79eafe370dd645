// The parts of `meshscope compare --json` that the page shows.
import type { Known } from "./known";

export interface Shift {
  readonly low: number;
  readonly high: number;
  readonly p_value: number;
  readonly num_a: number;
  readonly num_b: number;
}

export interface ComparedMetric {
  readonly name: string;
  readonly unit: string;
  readonly a: Known<number>;
  readonly b: Known<number>;
  readonly shift: Known<Shift>;
  readonly is_lower_better: boolean;
  readonly change_ratio: Known<number>;
  readonly interval_ratio: Known<readonly [number, number]>;
}

export interface ComparedLine {
  readonly name: string;
  readonly a_ns: Known<number>;
  readonly b_ns: Known<number>;
  readonly low_ns?: Known<number>;
  readonly high_ns?: Known<number>;
  readonly change_ns: Known<number>;
}

export interface Compared {
  readonly a: string;
  readonly b: string;
  readonly metrics: readonly ComparedMetric[];
  readonly provenance: readonly { readonly subject: string; readonly name: string; readonly a: Known<unknown>; readonly b: Known<unknown> }[];
  readonly loss: Known<{
    readonly name: string; readonly num_values: number; readonly num_ranks: number;
    readonly first_divergence: Known<{ readonly step: number; readonly rank?: number; readonly a: number; readonly b: number }>;
    readonly num_beyond: number; readonly largest_difference: number;
    readonly first_step: number; readonly last_step: number;
  }>;
  readonly budget: Known<{ readonly lines: readonly ComparedLine[]; readonly period: ComparedLine }>;
  readonly num_steps: readonly [number, number];
  readonly num_warmup: readonly [number, number];
  readonly verdict: Known<string>;
  readonly ledger: Known<{ readonly losses: readonly ComparedLine[] }>;
}
