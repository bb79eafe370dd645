// The parts of `meshscope memory --json` that the page shows.
import type { Known } from "./known";

export interface MemoryPoint {
  readonly name: string;
  readonly step: number;
  readonly microbatch: number;
  readonly seconds: Known<number>;
  readonly during: string;
  readonly categories_bytes: Readonly<Record<string, number>>;
  readonly attributed_bytes: number;
  readonly allocated_bytes: Known<number>;
  readonly residual_bytes: Known<number>;
}

export interface ModuleMemory {
  readonly path: string;
  readonly total_bytes: number;
  readonly categories_bytes: Readonly<Record<string, number>>;
}

export interface RankMemory {
  readonly rank: number;
  readonly place: Known<string>;
  readonly stage: Known<number>;
  readonly device: string;
  readonly allocator: string;
  readonly points: readonly MemoryPoint[];
  readonly peak: Known<MemoryPoint>;
  readonly modules: readonly ModuleMemory[];
  readonly problems: readonly string[];
}

export interface MemoryOverview {
  readonly ranks: readonly RankMemory[];
}
