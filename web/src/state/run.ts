// The run that is shown, with lookups that views share. Data arrives once, or again when it is live.
import type { Signal } from "@preact/signals";
import { computed, signal } from "@preact/signals";
import type { Known } from "../data/known";
import { isKnown, list } from "../data/known";
import type { Matrix } from "../data/matrix";
import { appendColumns, unpackMatrix } from "../data/matrix";
import type { FindingLinks, MeshRank, Metric, RunPage } from "../data/page";
import type { Finding, RankRange, StepSpans } from "../data/report";
import type { Source } from "../data/source";
import { clean } from "../text/names";

export interface ShownFinding extends Finding {
  readonly id: string;
  readonly lamp: string;
  readonly cause: string | null;
  readonly shown: FindingLinks["links"];
  readonly rankList: readonly number[];
}

/** New columns of a matrix: codes by rank and step, as base64 of uint16. */
export interface Columns {
  readonly metric: string;
  readonly ranks: readonly number[];
  readonly step_edges: readonly number[];
  readonly codes: string;
}

const AXIS_ORDER = ["pp", "dp", "cp", "ep", "tp"];

export class Run {
  readonly axes: readonly string[];
  readonly findings: readonly ShownFinding[];
  readonly rankNumbers: readonly number[];
  /** Counts what a live run added to the curve of steps, and to others. */
  readonly stepTick = signal(0);
  readonly seriesTick = signal(0);
  private readonly byRank: ReadonlyMap<number, MeshRank>;
  private readonly matrices = new Map<string, Signal<Known<Matrix> | "loading">>();
  private lines: Signal<readonly Matrix[] | null> | null = null;
  private readonly steps = new Map<number, Signal<Known<StepSpans> | "loading">>();

  constructor(readonly page: RunPage, readonly source: Source) {
    this.byRank = new Map(page.ranks.map((rank) => [rank.rank, rank]));
    this.rankNumbers = page.ranks.map((rank) => rank.rank);
    const degrees = isKnown(page.report.layout) ? page.report.layout.degrees : {};
    this.axes = AXIS_ORDER.filter((axis) => (degrees[axis] ?? 1) > 1);
    const found = isKnown(page.report.diagnosis) ? page.report.diagnosis.findings : [];
    this.findings = found.map((one, i) => {
      const links = page.findings[i];
      return {
        ...one, id: links?.id ?? `${one.code}.${i + 1}`, lamp: links?.lamp ?? "fast", cause: links?.cause ?? null,
        shown: links?.links ?? [], rankList: expandRanks(one.ranks),
      };
    });
  }

  rank(rank: number): MeshRank | undefined {
    return this.byRank.get(rank);
  }

  coordinates(rank: number): Readonly<Record<string, number>> | undefined {
    const found = this.byRank.get(rank)?.coordinates;
    return isKnown(found) ? found : undefined;
  }

  /** `dp0.tp1.pp1` with the axes in use; empty where the layout is not known. */
  place(rank: number): string {
    const at = this.coordinates(rank);
    if (at && this.axes.length) return ["dp", "tp", "pp", "cp", "ep"].filter((axis) => this.axes.includes(axis)).map((axis) => `${axis}${at[axis]}`).join(".");
    const label = this.byRank.get(rank)?.label;
    return isKnown(label) && this.axes.length ? clean(label, 40) : "";
  }

  /** `dp0.tp1.pp1 5`, or `rank 5`. */
  label(rank: number): string {
    const place = this.place(rank);
    return place ? `${place}  ${rank}` : `rank ${rank}`;
  }

  host(rank: number): string {
    const host = this.byRank.get(rank)?.host;
    return isKnown(host) ? clean(host, 40) : "";
  }

  stage(rank: number): number | undefined {
    return this.coordinates(rank)?.["pp"];
  }

  metric(key: string): Metric | undefined {
    return this.page.matrices?.metrics.find((metric) => metric.key === key);
  }

  /** Adds the columns of new steps to a matrix that is on the screen. */
  appendColumns(columns: Columns): void {
    const shown = this.matrices.get(`${columns.metric} `);
    const before = shown?.peek();
    if (!shown || !before || before === "loading" || !isKnown(before)) return;
    shown.value = appendColumns(before, columns) ?? before;
  }

  /** Waits for what another state of the run has on the screen. */
  async preload(before: Run): Promise<void> {
    const matrices = [...before.matrices.keys()].map(async (key) => {
      const [metric = "", phase = ""] = key.split(/ (.*)/s);
      this.matrices.set(key, signal<Known<Matrix> | "loading">(await this.source.matrix(metric, phase)));
    });
    const steps = [...before.steps.keys()].slice(-2).map(async (step) => {
      this.steps.set(step, signal<Known<StepSpans> | "loading">(await this.source.spans(step)));
    });
    await Promise.all([...matrices, ...steps]);
  }

  /** Reads a matrix; "loading" until it is there. */
  matrix(metric: string, phase = ""): Known<Matrix> | "loading" {
    const key = `${metric} ${phase}`;
    let found = this.matrices.get(key);
    if (!found) {
      found = signal<Known<Matrix> | "loading">("loading");
      this.matrices.set(key, found);
      const into = found;
      this.source.matrix(metric, phase).then((matrix) => (into.value = matrix), (error: unknown) => (into.value = { unavailable: String(error) }));
    }
    return found.value;
  }

  knownMatrix(metric: string, phase = ""): Matrix | undefined {
    const found = this.matrix(metric, phase);
    return found === "loading" || !isKnown(found) ? undefined : found;
  }

  /** Budget by line, rank and step, in the order of the budget's lines; null until it is there. */
  lineMatrices(): readonly Matrix[] | null {
    if (!this.lines) {
      this.lines = signal<readonly Matrix[] | null>(null);
      const into = this.lines;
      const found = this.page.budget_steps;
      const cells = isKnown(found) ? found.cells : [];
      Promise.all(cells.map(unpackMatrix)).then((all) => (into.value = all), () => (into.value = []));
    }
    return this.lines.value;
  }

  spans(step: number): Known<StepSpans> | "loading" {
    let found = this.steps.get(step);
    if (!found) {
      found = signal<Known<StepSpans> | "loading">("loading");
      this.steps.set(step, found);
      const into = found;
      this.source.spans(step).then((spans) => (into.value = spans), (error: unknown) => (into.value = { unavailable: String(error) }));
    }
    return found.value;
  }

  /** First and last step number that any view has. */
  get stepRange(): readonly [number, number] {
    const curve = this.page.series.find((one) => one.key === "step");
    const last = Math.max(0, ...list(this.page.report.ranks).map((rank) => (typeof rank.last_step === "number" ? rank.last_step : 0)));
    if (curve?.step.length) return [curve.step[0]!, Math.max(last, curve.step[curve.step.length - 1]!)];
    return [0, Math.max(last, this.page.report.steps.num_steps - 1)];
  }

  /** Ranks in an order: by place, the worst first, by host, by number. */
  order(how: string, worth?: (rank: number) => number): readonly number[] {
    const ranks = [...this.rankNumbers];
    if (how === "rank") return ranks;
    if (how === "worst" && worth) {
      const value = new Map(ranks.map((rank) => [rank, worth(rank)]));
      return ranks.sort((a, b) => (value.get(b) || 0) - (value.get(a) || 0) || a - b);
    }
    if (how === "host") return ranks.sort((a, b) => this.host(a).localeCompare(this.host(b), "en", { numeric: true }) || a - b);
    const axes = this.axes;
    return ranks.sort((a, b) => {
      const [x, y] = [this.coordinates(a), this.coordinates(b)];
      for (const axis of axes) {
        const gap = (x?.[axis] ?? 0) - (y?.[axis] ?? 0);
        if (gap) return gap;
      }
      return a - b;
    });
  }
}

export function expandRanks(ranges: readonly (RankRange | number)[] | null | undefined): readonly number[] {
  const ranks: number[] = [];
  for (const one of ranges ?? []) {
    if (typeof one === "number") ranks.push(one);
    else for (let rank = one.first; rank <= one.last && ranks.length < 100_000; rank++) ranks.push(rank);
  }
  return ranks;
}

export const run = signal<Run | null>(null);
export const runLabel = computed(() => clean(run.value?.page.meta.title ?? "meshscope", 60));
