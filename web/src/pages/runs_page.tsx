// The list of runs of `meshscope serve`: the newest first, live rows, two to compare.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { address, getJson } from "../data/http";
import type { Known } from "../data/known";
import { isKnown, reasonOf } from "../data/known";
import { theme } from "../draw/theme";
import { Logo, Severity, StateIcon } from "../parts/icons";
import { go } from "../state/fragment";
import { clean, cleanText, sentence } from "../text/names";
import { count, duration, logged, moment, plural, ratio } from "../text/units";
import { ThemeButton, isHelpOpen } from "./header";

interface Summary {
  readonly step_ns: Known<number>;
  readonly tokens_per_s: Known<number>;
  readonly mfu_ratio: Known<number>;
  readonly loss: Known<number>;
  readonly worst: { readonly severity: string; readonly code: string; readonly title: string } | null;
  readonly is_complete: boolean;
}

export interface RunRow {
  readonly id: string;
  readonly name: string;
  readonly folder: string;
  readonly state: string;
  readonly state_text: string;
  readonly problem: string | null;
  readonly started_unix_ns: number | null;
  readonly num_ranks: number | null;
  readonly world_size: number | null;
  readonly layout: Known<string> | null;
  readonly device: Known<string> | null;
  readonly num_steps: number | null;
  readonly spark_ns: readonly number[];
  readonly summary: Known<Summary>;
}

export const RUNS_KEYS: readonly (readonly [string, string])[] = [
  ["j k", "next and previous run"], ["Enter", "open it"], ["Space", "mark it for a comparison"], ["c", "compare the two marked runs"],
  ["/", "search: state:failed layout:tp2"], ["t", "light or dark"], ["Esc", "unmark"], ["?", "this list"],
];

const READ_MS = 2000;
const MAX_SHOWN = 500;
const GOOD = new Set(["finished", "live"]);

export function RunsPage() {
  const rows = useSignal<readonly RunRow[] | null>(null);
  const problem = useSignal("");
  const text = useSignal(new URLSearchParams(location.search).get("q") ?? "");
  const marked = useSignal<readonly string[]>(new URLSearchParams(location.search).getAll("compare").slice(0, 2));
  const at = useSignal(-1);
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => {
    document.title = "Runs · meshscope";
    return readOften((found) => { rows.value = found; problem.value = ""; }, (error) => (problem.value = error));
  }, []);
  const found = (rows.value ?? []).filter((row) => matches(row, text.value));
  const shown = found.slice(0, MAX_SHOWN);
  const mark = (id: string): void => {
    const now = marked.peek();
    marked.value = now.includes(id) ? now.filter((one) => one !== id) : [...now, id].slice(-2);
  };
  const compare = (): void => {
    const [a, b] = marked.peek();
    if (a && b) location.assign(address(`compare?${new URLSearchParams({ a, b })}`));
  };
  const type = (value: string): void => {
    text.value = value.slice(0, 200);
    at.value = -1;
    const query = new URLSearchParams(text.value ? { q: text.value } : {}).toString();
    history.replaceState(null, "", `${location.pathname}${query ? `?${query}` : ""}${location.hash}`);
  };
  useEffect(() => {
    const act = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const target = event.target as HTMLElement | null;
      if (target?.closest("dialog[open]")) return;
      if (target instanceof HTMLInputElement && target.type === "search") {
        if (event.key === "Escape") target.blur();
        return;
      }
      const row = shown[at.peek()];
      switch (event.key) {
        case "j": case "ArrowDown": at.value = Math.min(shown.length - 1, at.peek() + 1); break;
        case "k": case "ArrowUp": at.value = Math.max(0, at.peek() - 1); break;
        case "Enter": if (!row || row.problem || target?.closest("a, button")) return; location.assign(address(`run/${encodeURIComponent(row.id)}`)); break;
        case " ": if (!row || target?.closest("input, button")) return; mark(row.id); break;
        case "c": compare(); break;
        case "/": search.current?.focus(); break;
        case "t": go({ t: theme.peek().name === "dark" ? "light" : "dark" }); break;
        case "?": isHelpOpen.value = true; break;
        case "Escape": marked.value = []; at.value = -1; break;
        default: return;
      }
      event.preventDefault();
      document.getElementById(`run-${shown[at.peek()]?.id}`)?.scrollIntoView({ block: "nearest" });
    };
    addEventListener("keydown", act);
    return () => removeEventListener("keydown", act);
  });
  return (
    <>
      <header class="top"><div class="head">
        <Logo /><h1>Runs</h1>
        <span class="facts" role="status">{rows.value ? `${plural(found.length, "run")}${found.length === rows.value.length ? "" : ` of ${rows.value.length}`}` : "reading…"}</span>
        <input ref={search} type="search" aria-label="Search runs" placeholder="state:failed layout:tp2" size={30} value={text.value} onInput={(event) => type(event.currentTarget.value)} />
        <button type="button" disabled={marked.value.length < 2} title="c" onClick={compare}>Compare{marked.value.length ? ` (${marked.value.length} of 2)` : ""}</button>
        <ThemeButton />
        <button type="button" class="icon" aria-label="Keys" onClick={() => (isHelpOpen.value = true)}>?</button>
      </div></header>
      <main>
        {problem.value && <p class="banner" role="alert">{cleanText(problem.value)}</p>}
        {rows.value?.length === 0 && <p class="banner" role="note">There is no run below the served folders yet. Record one with <code>meshscope run -- torchrun … train.py</code>; it appears here by itself.</p>}
        {rows.value && rows.value.length > 0 && found.length === 0 && <p class="banner" role="note">No run matches. Words are <code>state:</code>, <code>name:</code>, <code>layout:</code>, <code>device:</code>, <code>finding:</code>, or any text.</p>}
        {shown.length > 0 && (
          <section class="card" aria-label="Runs">
            <div class="wide"><table class="runs">
              <thead><tr>
                <th><span class="sr">compare</span></th><th>state</th><th>name</th><th>started</th><th class="right">ranks</th><th>layout</th><th>device</th>
                <th class="right">steps</th><th>step time</th><th class="right">tokens/s</th><th class="right">MFU</th><th class="right">loss</th><th>worst finding</th><th>trust</th>
              </tr></thead>
              <tbody>{shown.map((row, i) => <Row key={row.id} row={row} isMarked={marked.value.includes(row.id)} isHere={i === at.value} mark={mark} />)}</tbody>
            </table></div>
            {found.length > MAX_SHOWN && <p class="note">The newest {MAX_SHOWN} of {found.length}: search for others.</p>}
          </section>
        )}
      </main>
    </>
  );
}

function Row({ row, isMarked, isHere, mark }: { row: RunRow; isMarked: boolean; isHere: boolean; mark: (id: string) => void }) {
  const summary = isKnown(row.summary) ? row.summary : null;
  const name = clean(row.name, 60);
  return (
    <tr id={`run-${row.id}`} aria-selected={isHere || isMarked}>
      <td>{!row.problem && <input type="checkbox" aria-label={`Compare ${name}`} checked={isMarked} onChange={() => mark(row.id)} />}</td>
      <td class="nowrap"><State row={row} /></td>
      <td>{row.problem ? <b>{name}</b> : <a href={address(`run/${encodeURIComponent(row.id)}`)} title={cleanText(row.name)}>{name}</a>}
        <div class="note" title={cleanText(row.folder)}>{row.problem ? <span class="bad">{clean(row.problem, 240)}</span> : clean(row.folder, 80)}</div></td>
      <td class="nowrap">{row.started_unix_ns === null ? <None /> : moment(row.started_unix_ns)}</td>
      <td class="right">{row.num_ranks === null ? <None /> : row.world_size !== null && row.world_size > row.num_ranks ? `${count(row.num_ranks)} of ${count(row.world_size)}` : count(row.num_ranks)}</td>
      <td class="nowrap" title={isKnown(row.layout) ? cleanText(row.layout) : ""}><Value found={row.layout} show={(one: string) => clean(one.replace(/ \(.*/, ""), 30)} /></td>
      <td><Value found={row.device} show={(one) => clean(one, 30)} /></td>
      <td class="right">{row.num_steps === null ? <None /> : count(row.num_steps)}</td>
      <td class="nowrap"><Value found={summary ? summary.step_ns : median(row.spark_ns)} show={duration} /><Spark values={row.spark_ns} /></td>
      <td class="right"><Value found={summary?.tokens_per_s ?? row.summary} show={count} /></td>
      <td class="right"><Value found={summary?.mfu_ratio ?? row.summary} show={ratio} /></td>
      <td class="right"><Value found={summary?.loss ?? row.summary} show={logged} /></td>
      <td>{summary ? summary.worst ? <span class="row tight"><Severity word={summary.worst.severity} /><span>{clean(sentence(summary.worst.title), 80)}</span></span> : <span class="dim">nothing found</span> : <None why={reasonOf(row.summary)} />}</td>
      <td>{summary ? <span title={summary.is_complete ? "every rank is there, finished and undamaged" : "a rank is missing, unfinished or damaged, or an error was caught"}><StateIcon state={summary.is_complete ? "ok" : "attention"} /></span> : <None why={reasonOf(row.summary)} />}</td>
    </tr>
  );
}

function State({ row }: { row: RunRow }) {
  const isBad = row.state === "failed" || row.state === "stuck" || row.state === "unreadable";
  return (
    <span class={`pill ${row.state === "live" ? "live" : isBad ? "bad" : ""}`} title={cleanText(row.state_text)}>
      {row.state === "live" ? <span class="dot" aria-hidden="true" /> : <StateIcon size={12} state={isBad ? "bad" : GOOD.has(row.state) ? "ok" : "unknown"} />}{clean(row.state, 16)}
    </span>
  );
}

function None({ why = "" }: { why?: string }) {
  return <span class="dim" title={cleanText(why)}>n/a</span>;
}

function Value({ found, show }: { found: Known<unknown> | null | undefined; show: (value: never) => string }) {
  if (found === null || found === undefined || !isKnown(found) || typeof found === "object") return <None why={reasonOf(found)} />;
  return <>{show(found as never)}</>;
}

function median(values: readonly number[]): number | null {
  return values.length ? [...values].sort((a, b) => a - b)[values.length >> 1]! : null;
}

function Spark({ values }: { values: readonly number[] }) {
  if (values.length < 2) return null;
  const usual = median(values)!;
  const top = Math.min(Math.max(...values), 3 * usual) || 1;
  const points = values.map((value, i) => `${((i / (values.length - 1)) * 82 + 1).toFixed(1)},${(20 - (Math.min(value, top) / top) * 18).toFixed(1)}`).join(" ");
  return <svg class="spark" viewBox="0 0 84 22" role="img" aria-label={`step time over the run, up to ${duration(Math.max(...values))}`}><polyline points={points} fill="none" stroke="var(--ink2)" stroke-width="1.2" /></svg>;
}

/** Reads the list again and again while the tab is seen. */
function readOften(take: (rows: readonly RunRow[]) => void, fail: (text: string) => void): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isEnded = false;
  const read = async (): Promise<void> => {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      take((await getJson<{ runs: readonly RunRow[] }>("api/v1/runs")).runs);
    } catch (error) {
      fail(`The list could not be read: ${error instanceof Error ? error.message : String(error)}. It is tried again.`);
    }
    if (!isEnded) timer = setTimeout(() => void read(), READ_MS);
  };
  const seen = (): void => { if (!document.hidden) void read(); };
  document.addEventListener("visibilitychange", seen);
  void read();
  return () => { isEnded = true; clearTimeout(timer); document.removeEventListener("visibilitychange", seen); };
}

/** `state:failed layout:tp2 word`: every word must be there. */
export function matches(row: RunRow, text: string): boolean {
  const known = (found: Known<string> | null): string => (isKnown(found) ? (found ?? "") : "");
  const worst = isKnown(row.summary) ? row.summary.worst : null;
  const all: Readonly<Record<string, string>> = {
    state: row.state, name: row.name, folder: row.folder, layout: known(row.layout), device: known(row.device),
    finding: worst ? `${worst.code} ${worst.severity} ${worst.title}` : "", problem: row.problem ?? "",
  };
  return text.toLowerCase().split(/\s+/).filter(Boolean).every((term) => {
    const split = /^([a-z]+):(.*)$/.exec(term);
    const hay = split && split[1]! in all ? all[split[1]!]! : Object.values(all).join(" ");
    return hay.toLowerCase().includes(split && split[1]! in all ? split[2]! : term);
  });
}
