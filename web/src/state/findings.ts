// Which finding is looked at, and how its evidence is shown.
import { computed } from "@preact/signals";
import type { Link } from "../data/page";
import { isKnown } from "../data/known";
import { severityRank } from "../parts/icons";
import { go, state } from "./fragment";
import { run } from "./run";
import type { ShownFinding } from "./run";

/** The finding that the verdict is about: the first, if it is above low. */
export const leading = computed<ShownFinding | null>(() => {
  const first = run.value?.findings[0];
  return first && severityRank(first.severity) > 1 ? first : null;
});

export const chosenFinding = computed<ShownFinding | null>(() => {
  const all = run.value?.findings ?? [];
  return all.find((one) => one.id === state.value.f) ?? leading.value ?? all.find((one) => isKnown(one.saved_ns) && one.saved_ns > 0) ?? null;
});

/** The name of the section that shows a view. */
export function sectionOf(view: string): string {
  return document.getElementById(view)?.tagName === "SECTION" ? view : "findings";
}

export function showEvidence(finding: ShownFinding, link: Link | undefined = finding.shown[0]): void {
  if (!link) return;
  const change = {
    f: finding.id, v: link.view, ax: link.axis ?? "",
    r: link.ranks.length ? [...link.ranks] : [],
    s: link.steps ? ([link.steps[0], link.steps[1]] as const) : null,
    ...(link.metric ? { m: link.metric } : {}),
    ...(link.view === "heat" ? { p: link.phase ?? "" } : {}),
    ...(link.step === null ? {} : { st: link.step, z: null }),
  };
  go(change);
  reveal(link.view);
  holdView(link.view, 500);
}

export function reveal(view: string): void {
  const id = sectionOf(view);
  requestAnimationFrame(() => {
    if (id === "verdict") scrollTo({ top: 0 });
    else document.getElementById(id)?.scrollIntoView({ block: "start", behavior: "auto" });
  });
}

/** Keeps a view in place while those above it still grow, until the reader moves. */
export function holdView(view: string, milliseconds: number): void {
  const watch = new ResizeObserver(() => reveal(view));
  const events = ["wheel", "pointerdown", "keydown", "touchstart"] as const;
  const stop = (): void => {
    watch.disconnect();
    for (const event of events) removeEventListener(event, stop);
  };
  watch.observe(document.body);
  for (const event of events) addEventListener(event, stop, { passive: true });
  setTimeout(stop, milliseconds);
}
