// Where data comes from: the file itself, or `meshscope serve`. Views never know which.
import type { Known } from "./known";
import type { Matrix } from "./matrix";
import type { PageDocument } from "./page";
import type { StepSpans } from "./report";

export interface LiveEvent {
  readonly kind: "hello" | "status" | "steps" | "series" | "report" | "hang" | "finding" | "end" | "reset" | "lost";
  readonly data: Readonly<Record<string, unknown>>;
}

export interface Source {
  /** Whether more can be asked for than the page came with. */
  readonly isLive: boolean;
  load(): Promise<PageDocument>;
  matrix(metric: string, phase: string): Promise<Known<Matrix>>;
  /** A part of it at full resolution, where it can be had. */
  window(metric: string, phase: string, ranks: readonly [number, number], steps: readonly [number, number]): Promise<Known<Matrix>>;
  spans(step: number): Promise<Known<StepSpans>>;
  /** Steps whose spans can be had; null: any. */
  spanSteps(): readonly number[] | null;
  /** Calls back for every event; the result ends it. */
  follow(heard: (event: LiveEvent) => void): () => void;
}
