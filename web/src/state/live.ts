// A run that is still recorded: what arrives is added to what is shown, and nothing jumps.
import { signal } from "@preact/signals";
import { isKnown } from "../data/known";
import type { RunPage } from "../data/page";
import type { Curve } from "../data/report";
import type { LiveEvent, Source } from "../data/source";
import { state } from "./fragment";
import { heatZoom } from "./heat_zoom";
import type { Columns } from "./run";
import { Run, run } from "./run";

export interface LiveStatus {
  readonly state: string;
  readonly text: string;
  readonly step: number | null;
  /** By this browser's clock. */
  readonly readAt: number;
  /** When the connection was lost; null while it holds. */
  readonly lostAt: number | null;
  readonly isOver: boolean;
}

export const live = signal<LiveStatus | null>(null);
/** Steps that arrived while a selection or a zoom was on: they are added on request. */
export const waitingSteps = signal(0);
/** Findings that are new, gone or changed and not yet sorted in. */
export const changedFindings = signal(0);
export const clock = signal(Date.now());

const MAX_POINTS = 4000;
const RELOAD_MS = 3000;
let latest: RunPage | null = null;
let held: (() => void)[] = [];
/** What arrived last: a page that is newer than its predecessor may be older than these. */
let arrived: (() => void)[] = [];
const MAX_ARRIVED = 600;
let isLoading = false;
let isStale = false;

export function followRun(source: Source): void {
  const isHere = run.peek()?.page.meta.state?.kind;
  if (!source.isLive || isHere === "finished" || isHere === "failed" || isHere === "traces") return;
  const timer = setInterval(() => (clock.value = Date.now()), 1000);
  source.follow((event) => {
    hear(event, source);
    if (event.kind === "end") clearInterval(timer);
  });
}

function hear({ kind, data }: LiveEvent, source: Source): void {
  switch (kind) {
    case "hello":
      if (live.value) live.value = { ...live.value, lostAt: null };
      break;
    case "status":
      clock.value = Date.now();
      live.value = {
        state: String(data["state"] ?? ""), text: String(data["text"] ?? ""), step: typeof data["step"] === "number" ? data["step"] : null,
        readAt: Date.now(), lostAt: null, isOver: false,
      };
      break;
    case "steps":
      add(() => addSteps(data), (data["steps"] as readonly number[]).length);
      break;
    case "series":
      add(() => addPoints(data["points"] as readonly Points[]), 0);
      break;
    case "report":
    case "reset":
      void reload(source);
      break;
    case "finding":
      changedFindings.value++;
      break;
    case "end":
      if (live.value) live.value = { ...live.value, isOver: true };
      void reload(source);
      break;
    case "lost":
      live.value = { state: "", text: "", step: null, readAt: 0, isOver: false, ...live.value, lostAt: data["since"] as number };
      break;
    default:
  }
}

/** With a selection or a zoom the picture stays as it is until it is asked for. */
function add(apply: () => void, numSteps: number): void {
  arrived = [...arrived.slice(1 - MAX_ARRIVED), apply];
  const { s, z } = state.peek();
  if (!s && !z && !heatZoom.peek()) {
    showWaiting();
    apply();
    return;
  }
  held.push(apply);
  waitingSteps.value += numSteps;
}

export function showWaiting(): void {
  for (const apply of held.splice(0)) apply();
  waitingSteps.value = 0;
}

interface Points {
  readonly key: string;
  readonly step: readonly number[];
  readonly value: readonly (number | null | object)[];
}

function addSteps(data: Readonly<Record<string, unknown>>): void {
  const shown = run.peek();
  if (!shown) return;
  const steps = data["steps"] as readonly number[];
  if (steps.length) extend(shown, { key: "step", step: steps, value: data["job_ns"] as readonly number[] });
  const matrix = data["matrix"] as Columns | null;
  if (matrix) shown.appendColumns(matrix);
  shown.stepTick.value++;
}

function addPoints(points: readonly Points[]): void {
  const shown = run.peek();
  if (!shown) return;
  for (const one of points) extend(shown, one);
  shown.seriesTick.value++;
}

/** A curve with further points, in its place: views find it there when they look again. */
function extend(shown: Run, points: Points): void {
  const series = shown.page.series as Curve[];
  const at = series.findIndex((one) => one.key === points.key);
  const old = series[at];
  if (!old) return;
  const last = old.step[old.step.length - 1] ?? -1;
  const from = points.step.findIndex((step) => step > last);
  if (from < 0) return;
  const values = points.value.slice(from).map((value) => (typeof value === "number" ? value : null));
  const join = <T>(a: readonly T[], b: readonly T[]): T[] => [...a, ...b].slice(-MAX_POINTS);
  series[at] = {
    ...old, num_values: old.num_values + values.length, step: join(old.step, points.step.slice(from)),
    low: join(old.low, values), mean: join(old.mean, values), high: join(old.high, values),
  };
}

/** The whole page again, shown once all that is on the screen has arrived. */
async function reload(source: Source): Promise<void> {
  isStale = true;
  if (isLoading) return;
  isLoading = true;
  while (isStale) {
    isStale = false;
    try {
      const page = (await source.load()) as RunPage;
      const before = run.peek();
      const next = new Run(before ? keepOrder(before.page, page) : page, source);
      if (before) await next.preload(before);
      latest = page;
      held = [];
      waitingSteps.value = 0;
      if (sameOrder(next.page, page)) changedFindings.value = 0;
      run.value = next;
      for (const apply of arrived) apply();
    } catch {
      isStale = true; // the server may be starting again
      await new Promise((resolve) => setTimeout(resolve, RELOAD_MS));
    }
  }
  isLoading = false;
}

/** Findings in their new order, at the reader's request. */
export function sortFindings(): void {
  const shown = run.peek();
  if (shown && latest) {
    const next = new Run(latest, shown.source);
    void next.preload(shown).then(() => (run.value = next));
  }
  changedFindings.value = 0;
}

/** Findings that were there stay where they were; new ones follow. */
function keepOrder(before: RunPage, page: RunPage): RunPage {
  const diagnosis = page.report.diagnosis;
  if (!isKnown(diagnosis) || !isKnown(before.report.diagnosis)) return page;
  const nameOf = (one: { readonly code: string; readonly ranks: unknown }): string => `${one.code} ${JSON.stringify(one.ranks)}`;
  const place = new Map(before.report.diagnosis.findings.map((one, i) => [nameOf(one), i]));
  const order = diagnosis.findings.map((one, i) => [place.get(nameOf(one)) ?? 1e6 + i, i] as const).sort((a, b) => a[0] - b[0]).map(([, i]) => i);
  return {
    ...page, findings: order.map((i) => page.findings[i]!),
    report: { ...page.report, diagnosis: { ...diagnosis, findings: order.map((i) => diagnosis.findings[i]!) } },
  };
}

function sameOrder(a: RunPage, b: RunPage): boolean {
  return a.findings.every((one, i) => one.id === b.findings[i]?.id);
}
