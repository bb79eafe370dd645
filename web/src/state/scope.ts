// The selection that all views share: steps, ranks, an axis. Findings and verdict never change with it.
import { computed } from "@preact/signals";
import { nameRanks } from "../text/names";
import { go, state } from "./fragment";

export const chosenRanks = computed<ReadonlySet<number>>(() => new Set(state.value.r));
export const chosenSteps = computed(() => state.value.s);
export const chosenAxis = computed(() => state.value.ax);

/** "steps 15–39, rank 5"; empty where nothing is selected. */
export const scopeText = computed(() => {
  const { r, s, ax } = state.value;
  const parts: string[] = [];
  if (s) parts.push(s[0] === s[1] ? `step ${s[0]}` : `steps ${s[0]}–${s[1]}`);
  if (r.length) parts.push(nameRanks(r));
  if (ax) parts.push(`axis ${ax}`);
  return parts.join(", ");
});

/** A click on ranks selects them, with shift adds them; the same ranks again clear them. */
export function selectRanks(ranks: readonly number[], isAdding: boolean): void {
  const now = state.peek().r;
  if (isAdding) {
    const all = new Set(now);
    const isThere = ranks.every((rank) => all.has(rank));
    for (const rank of ranks) if (isThere) all.delete(rank);
    else all.add(rank);
    go({ r: [...all].sort((a, b) => a - b) });
  } else {
    const isSame = ranks.length === now.length && ranks.every((rank, i) => rank === now[i]);
    go({ r: isSame ? [] : [...ranks].sort((a, b) => a - b) });
  }
}

export function selectSteps(from: number, to: number, isDone: boolean): void {
  const steps = [Math.min(from, to), Math.max(from, to)] as const;
  go({ s: steps }, isDone ? "push" : "replace");
}

export function clearSelection(): void {
  go({ r: [], s: null, ax: "", f: "", l: "" });
}

export function isInScope(rank: number): boolean {
  const { r } = state.value;
  return r.length === 0 || chosenRanks.value.has(rank);
}
