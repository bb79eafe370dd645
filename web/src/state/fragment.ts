// The state of the page is in the fragment of its address, so that a link leads to what was seen.
import { signal } from "@preact/signals";

export interface PageState {
  /** The view that has the focus of the reader: a section's name. */
  v: string;
  /** Metric of the heat map. */
  m: string;
  /** Order of ranks. */
  o: string;
  /** Selected ranks; empty: all. */
  r: readonly number[];
  /** Selected steps, first and last; null: all. */
  s: readonly [number, number] | null;
  /** Selected axis; empty: all. */
  ax: string;
  /** Step of the timeline; null: the page's choice. */
  st: number | null;
  /** Zoom of the timeline, as shares of its length. */
  z: readonly [number, number] | null;
  /** Selected finding. */
  f: string;
  /** Theme; empty: the system's. */
  t: string;
  /** Attempt. */
  at: number | null;
  /** Phase of the heat map; empty: all. */
  p: string;
  /** Lamp that filters the findings. */
  l: string;
}

const EMPTY: PageState = {
  v: "", m: "", o: "", r: [], s: null, ax: "", st: null, z: null, f: "", t: "", at: null, p: "", l: "",
};
const MAX_RANKS = 4096;
const WORD = /^[\w .:#-]{1,64}$/;

export function parseFragment(text: string): PageState {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  const word = (name: string): string => {
    const value = given.get(name) ?? "";
    return WORD.test(value) ? value : "";
  };
  return {
    v: word("v"), m: word("m"), o: word("o"), ax: word("ax"), f: word("f"), t: word("t"), p: word("p"),
    l: word("l"),
    r: parseRanges(given.get("r") ?? ""),
    s: parsePair(given.get("s") ?? "", true),
    st: parseWhole(given.get("st")),
    z: parsePair(given.get("z") ?? "", false),
    at: parseWhole(given.get("at")),
  };
}

export function formatFragment(state: PageState): string {
  const parts: string[] = [];
  const add = (name: string, value: string): void => {
    if (value !== "") parts.push(`${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`);
  };
  add("v", state.v);
  add("m", state.m);
  add("o", state.o);
  add("p", state.p);
  add("r", formatRanges(state.r));
  add("s", state.s ? `${state.s[0]}-${state.s[1]}` : "");
  add("ax", state.ax);
  add("st", state.st === null ? "" : `${state.st}`);
  add("z", state.z ? state.z.map((x) => Number(x.toFixed(4))).join("-") : "");
  add("f", state.f);
  add("l", state.l);
  add("t", state.t);
  add("at", state.at === null ? "" : `${state.at}`);
  return parts.length ? `#${parts.join("&")}` : "";
}

function parseWhole(text: string | null): number | null {
  return text !== null && /^\d{1,12}$/.test(text) ? Number(text) : null;
}

function parsePair(text: string, isWhole: boolean): readonly [number, number] | null {
  const found = /^([\d.]{1,14})-([\d.]{1,14})$/.exec(text);
  if (!found) return null;
  const [a, b] = [Number(found[1]), Number(found[2])];
  if (!Number.isFinite(a) || !Number.isFinite(b) || b < a || (!isWhole && (a === b || b > 1))) return null;
  return isWhole ? [Math.round(a), Math.round(b)] : [a, b];
}

export function parseRanges(text: string): readonly number[] {
  const ranks = new Set<number>();
  for (const part of text.split(",")) {
    const found = /^\s*(\d{1,7})(?:\s*[-–]\s*(\d{1,7}))?\s*$/.exec(part);
    if (!found) continue;
    const last = Number(found[2] ?? found[1]);
    for (let rank = Number(found[1]); rank <= last && ranks.size < MAX_RANKS; rank++) ranks.add(rank);
  }
  return [...ranks].sort((a, b) => a - b);
}

export function formatRanges(ranks: readonly number[]): string {
  const parts: string[] = [];
  for (let i = 0; i < ranks.length; ) {
    let j = i;
    while (j + 1 < ranks.length && ranks[j + 1] === ranks[j]! + 1) j++;
    parts.push(i === j ? `${ranks[i]}` : `${ranks[i]}-${ranks[j]}`);
    i = j + 1;
  }
  return parts.join(",");
}

export const state = signal<PageState>(typeof location === "undefined" ? EMPTY : parseFragment(location.hash));

/** Changes the state. A click is a new entry of the history; brushing and typing are not. */
export function go(change: Partial<PageState>, how: "push" | "replace" = "push"): void {
  const next = { ...state.peek(), ...change };
  const fragment = formatFragment(next);
  if (fragment === formatFragment(state.peek())) return;
  state.value = next;
  const address = fragment || `${location.pathname}${location.search}`;
  if (how === "push") history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

export function followHistory(): void {
  addEventListener("popstate", () => (state.value = parseFragment(location.hash)));
  addEventListener("hashchange", () => (state.value = parseFragment(location.hash)));
}
