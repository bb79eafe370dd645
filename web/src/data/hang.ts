// The parts of `meshscope hang --json` that the page shows.

export interface HangOperation {
  readonly rank: number;
  readonly kind: string;
  readonly size_bytes: number;
  readonly phase: string;
  readonly step: number | null;
  readonly group: string;
  readonly axis: string;
  readonly sequence: number;
  readonly peer: number | null;
}

export interface HangWait {
  readonly rank: number;
  readonly operation: HangOperation;
  readonly waited_ns: number;
  readonly waits_for: readonly number[];
  readonly is_certain: boolean;
}

export interface StackFrame {
  readonly file: string;
  readonly line: number | null;
  readonly function: string;
}

export interface Hang {
  readonly kind: string;
  readonly is_stuck: boolean;
  readonly is_certain: boolean;
  readonly sentence: string;
  /** What to do about it; empty where nothing hangs. */
  readonly advice: string;
  readonly age_ns: number | null;
  readonly asked_unix_ns: number;
  readonly operation: { readonly kind: string; readonly axis: string; readonly sequence: number; readonly ranks: readonly number[]; readonly missing: readonly number[] } | null;
  readonly waiting: readonly HangWait[];
  readonly cascade: readonly HangWait[];
  readonly culprits: readonly {
    readonly rank: number; readonly reason: string; readonly evidence: readonly string[]; readonly stack: readonly StackFrame[];
  }[];
  readonly waiting_stack: { readonly rank: number; readonly frames: readonly StackFrame[] } | null;
  readonly ranks: readonly { readonly rank: number; readonly place: string; readonly host: string; readonly process: string;
    readonly process_detail: string; readonly step: number | null; readonly phase: string | null }[];
  readonly notes: readonly string[];
}
