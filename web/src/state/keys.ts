// Keys of the page. They act only where nobody types, and never with a modifier.
import { reveal, showEvidence } from "./findings";
import { go, state } from "./fragment";
import { heatZoom, setHeatZoom } from "./heat_zoom";
import { run } from "./run";
import { clearSelection } from "./scope";
import { copy } from "../text/files";
import { linkText } from "../text/markdown";
import { isHelpOpen } from "../pages/header";
import { tabsOf } from "../pages/run_page";
import { theme } from "../draw/theme";
import { shownStep } from "../views/timeline";
import { heatMetric } from "../views/heat";

export const KEYS: readonly (readonly [string, string])[] = [
  ["j k", "next and previous finding"], ["Enter", "its evidence"], ["1 … 7", "sections"], ["← →", "step of the timeline"],
  ["[ ]", "fastest, slowest step"], ["w s a d", "zoom and pan the timeline, or the heat map while it is on screen alone"], ["0", "whole step, all steps"],
  ["m", "metric of the heat map"], ["o", "order of ranks"], ["r", "choose ranks"], ["/", "search ranks"], ["x", "export"], ["y", "copy link"],
  ["t", "light or dark"], ["Esc", "clear the selection"], ["?", "this list"],
];

const ORDERS = ["mesh", "worst", "host", "rank"];

export function followKeys(): void {
  addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement | null;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    // A dialog that was just closed keeps the focus until the next frame.
    if (target && (["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName) || target.isContentEditable || target.closest("dialog[open]"))) return;
    if (event.key === "Enter" && target && ["BUTTON", "SUMMARY", "A"].includes(target.tagName)) return;
    if (act(event.key)) event.preventDefault();
  });
}

function act(key: string): boolean {
  const shown = run.peek();
  if (!shown) return false;
  if (/^[1-7]$/.test(key)) {
    const tab = tabsOf()[Number(key) - 1];
    if (!tab) return false;
    go({ v: tab.section });
    reveal(tab.section);
    return true;
  }
  switch (key) {
    case "j":
    case "k":
      return moveFinding(key === "j" ? 1 : -1);
    case "Enter": {
      const finding = shown.findings.find((one) => one.id === state.peek().f);
      if (!finding) return false;
      showEvidence(finding);
      return true;
    }
    case "ArrowLeft":
    case "ArrowRight":
      return moveStep(key === "ArrowRight" ? 1 : -1);
    case "[":
    case "]": {
      const name = key === "[" ? "fastest" : "slowest";
      const step = shown.page.timelines.find((one) => one.picked.includes(name))?.step;
      if (step !== undefined) go({ st: step, z: null });
      return step !== undefined;
    }
    case "w":
    case "s":
    case "a":
    case "d":
      return zoom(key);
    case "0":
      setHeatZoom(null);
      go({ z: null }, "replace");
      return true;
    case "m": {
      const keys = (shown.page.matrices?.metrics ?? []).filter((one) => one.reason === null).map((one) => one.key);
      if (keys.length) go({ m: keys[(keys.indexOf(heatMetric(shown)) + 1) % keys.length]!, p: "" });
      return keys.length > 0;
    }
    case "o":
      go({ o: ORDERS[(ORDERS.indexOf(state.peek().o || "mesh") + 1) % ORDERS.length]! });
      return true;
    case "r":
    case "/":
      reveal("ranks");
      document.getElementById("rank-filter")?.focus();
      return true;
    case "x":
      document.getElementById("export")?.click();
      return true;
    case "y":
      void copy(linkText(), "link");
      return true;
    case "t":
      go({ t: theme.peek().name === "dark" ? "light" : "dark" });
      return true;
    case "?":
      isHelpOpen.value = true;
      return true;
    case "Escape":
      clearSelection();
      return true;
    default:
      return false;
  }
}

function moveFinding(by: number): boolean {
  const all = run.peek()?.findings ?? [];
  if (!all.length) return false;
  const at = all.findIndex((one) => one.id === state.peek().f);
  const next = all[at < 0 ? 0 : (at + by + all.length) % all.length]!;
  go({ f: next.id }, "replace");
  document.getElementById(`finding-${next.id}`)?.scrollIntoView({ block: "nearest" });
  return true;
}

function moveStep(by: number): boolean {
  const shown = run.peek()!;
  const now = shownStep(shown);
  const steps = shown.source.spanSteps();
  if (now === null) return false;
  const [first, last] = shown.stepRange;
  const next = steps
    ? by > 0 ? steps.find((step) => step > now) : [...steps].reverse().find((step) => step < now)
    : Math.min(last, Math.max(first, now + by));
  if (next !== undefined) go({ st: next, z: null });
  return true;
}

/** Acts on the timeline while it is in the window, else on the heat map. */
function zoom(key: string): boolean {
  const isIn = (id: string): boolean => {
    const box = document.getElementById(id)?.getBoundingClientRect();
    return Boolean(box && box.bottom > 80 && box.top < innerHeight);
  };
  const shown = run.peek()!;
  const isTimeline = isIn("timeline") || !isIn("heat");
  const matrix = isTimeline ? undefined : shown.knownMatrix(heatMetric(shown));
  const [low, high] = isTimeline || !matrix ? [0, 1] : [matrix.edges[0]!, matrix.edges[matrix.numColumns]!];
  const [a, b] = (isTimeline ? state.peek().z : heatZoom.peek()) ?? [low, high];
  const width = b - a;
  const factor = key === "w" ? 0.6 : key === "s" ? 1 / 0.6 : 1;
  const shift = key === "a" ? -0.2 * width : key === "d" ? 0.2 * width : 0;
  const next = Math.min(high - low, width * factor);
  const start = Math.min(high - next, Math.max(low, (a + b) / 2 - next / 2 + shift));
  const isWhole = next >= (high - low) * 0.999;
  if (isTimeline) go({ z: isWhole ? null : [start, start + next] }, "replace");
  else setHeatZoom(isWhole || next < 3 ? (isWhole ? null : heatZoom.peek()) : [start, start + next]);
  return true;
}
