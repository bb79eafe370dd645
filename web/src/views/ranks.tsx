// V16: the table of ranks: sortable, filtered, and only as many rows in the document as are seen.
import { useSignal } from "@preact/signals";
import { isKnown, num } from "../data/known";
import { columnsOf, rowMean } from "../data/matrix";
import { Card } from "../parts/card";
import type { Run } from "../state/run";
import { go, parseRanges, state } from "../state/fragment";
import { chosenRanks, selectRanks } from "../state/scope";
import type { Cell } from "../text/files";
import { filterRows } from "../text/filter";
import type { Column } from "../text/filter";
import { clean } from "../text/names";
import { plural, withUnit } from "../text/units";

const ROW = 33;
const VIEW = 16 * ROW;

export interface RankRow {
  readonly rank: number;
  readonly values: Readonly<Record<string, Cell>>;
}

export function RanksView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const text = useSignal("");
  const sort = useSignal<{ key: string; isDown: boolean }>({ key: "rank", isDown: false });
  const scrolled = useSignal(0);
  const columns = columnsFor(run);
  const rows = rowsFor(run);
  const { kept, problem } = filterRows(rows, columns, text.value);
  const sorted = [...kept].sort((a, b) => compare(a.values[sort.value.key] ?? null, b.values[sort.value.key] ?? null) * (sort.value.isDown ? -1 : 1) || a.rank - b.rank);
  const first = Math.max(0, Math.min(sorted.length - 1, Math.floor(scrolled.value / ROW)) - 4);
  const shown = sorted.slice(first, first + Math.ceil(VIEW / ROW) + 9);
  const select = (): void => {
    const plain = /^[\d,\s\-–]+$/.test(text.value) ? parseRanges(text.value) : [];
    go({ r: plain.length ? plain : kept.length < rows.length ? kept.map((row) => row.rank).slice(0, 4096) : [] });
  };
  return (
    <Card id="ranks" title="Ranks" span={span} sub={`${plural(sorted.length, "rank")}${sorted.length < rows.length ? ` of ${rows.length}` : ""}; numbers per step`} isScoped={Boolean(state.value.s)}
      not="who is to blame by one column: a rank that waits little is often the one that others wait for"
      tools={<>
        <input id="rank-filter" type="search" aria-label="Filter ranks" placeholder="5,12-15   dp=3 host~node1 excess>5ms" value={text.value} size={34} spellcheck={false}
          onInput={(event) => (text.value = event.currentTarget.value.slice(0, 200))}
          onKeyDown={(event) => { if (event.key === "Enter") select(); if (event.key === "Escape") { text.value = ""; event.currentTarget.blur(); } }} />
        <button type="button" onClick={select}>Select</button>
      </>}
      table={() => ({ columns: columns.map((column) => column.key + column.suffix), rows: sorted.map((row) => columns.map((column) => row.values[column.key] ?? null)) })}>
      {problem && <p class="note bad" role="alert">{problem}</p>}
      <div class="scroll" style={{ height: `${Math.min(VIEW, (sorted.length + 1) * ROW + 12)}px`, maxHeight: `${VIEW}px` }} tabIndex={0} role="region" aria-label="Table of ranks" onScroll={(event) => (scrolled.value = event.currentTarget.scrollTop)}>
        <table aria-rowcount={sorted.length + 1}>
          <thead>
            <tr>
              {columns.map((column) => (
                <th key={column.key} class={column.unit === "text" ? "" : "right"} aria-sort={sort.value.key === column.key ? (sort.value.isDown ? "descending" : "ascending") : "none"}>
                  <button type="button" onClick={() => (sort.value = { key: column.key, isDown: sort.value.key === column.key ? !sort.value.isDown : column.unit !== "text" && column.key !== "rank" })}>
                    {column.label}{sort.value.key === column.key ? (sort.value.isDown ? " ▾" : " ▴") : ""}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {first > 0 && <tr style={{ height: `${first * ROW}px` }} aria-hidden="true"><td colSpan={columns.length} /></tr>}
            {shown.map((row) => (
              <tr key={row.rank} class={chosenRanks.value.has(row.rank) ? "chosen" : ""} style={{ height: `${ROW}px` }}>
                {columns.map((column) => <td key={column.key} class={column.unit === "text" ? "nowrap" : "right"}>{cell(row, column)}</td>)}
              </tr>
            ))}
            {first + shown.length < sorted.length && <tr style={{ height: `${(sorted.length - first - shown.length) * ROW}px` }} aria-hidden="true"><td colSpan={columns.length} /></tr>}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

function cell(row: RankRow, column: Column) {
  const value = row.values[column.key];
  if (column.key === "rank") return <button type="button" class="plain" onClick={(event) => selectRanks([row.rank], event.shiftKey)}><b>{row.rank}</b></button>;
  if (value === null || value === undefined) return <span class="dim">n/a</span>;
  if (column.unit === "text") return clean(value, 40);
  return withUnit(value, column.unit);
}

function compare(a: Cell, b: Cell): number {
  if (a === null || b === null) return (a === null ? 1 : 0) - (b === null ? 1 : 0);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const METRICS: readonly (readonly [string, string])[] = [["excess", "above peers"], ["work", "own work"], ["caused", "caused wait"], ["wait", "exposed wait"], ["transfer", "exposed transfer"]];

function columnsFor(run: Run): readonly Column[] {
  const has = (key: string): boolean => run.page.matrices?.layers.some((one) => one.metric === key && !one.phase) ?? false;
  return [
    { key: "rank", label: "rank", unit: "", suffix: "" },
    ...(run.axes.length ? ["dp", "tp", "pp", "cp", "ep"].filter((axis) => run.axes.includes(axis)).map((axis) => ({ key: axis, label: axis, unit: "", suffix: "" })) : []),
    { key: "host", label: "host", unit: "text", suffix: "" },
    ...(run.page.ranks.some((one) => isKnown(one.state)) ? [{ key: "state", label: "state", unit: "text", suffix: "" }] : []),
    { key: "steps", label: "steps", unit: "", suffix: "" },
    { key: "step", label: "step, median", unit: "ns", suffix: "_ns" },
    ...METRICS.filter(([key]) => has(key)).map(([key, label]) => ({ key, label, unit: "ns", suffix: "_ns" })),
    { key: "memory", label: "peak memory", unit: "bytes", suffix: "_bytes" },
  ];
}

function rowsFor(run: Run): readonly RankRow[] {
  const facts = new Map(run.page.report.ranks.map((rank) => [rank.rank, rank]));
  const steps = state.value.s;
  const matrices = METRICS.map(([key]) => [key, run.page.matrices?.layers.some((one) => one.metric === key && !one.phase) ? run.knownMatrix(key) : undefined] as const);
  return run.page.ranks.map((one) => {
    const fact = facts.get(one.rank);
    const values: Record<string, Cell> = {
      rank: one.rank, host: isKnown(one.host) ? one.host : null, state: isKnown(one.state) ? one.state : null, steps: one.num_steps,
      step: fact && isKnown(fact.step_time) ? fact.step_time.median_ns : null,
      memory: fact ? (num(fact.peak_device_bytes) ?? num(fact.peak_rss_bytes) ?? null) : null,
    };
    const at = run.coordinates(one.rank);
    for (const axis of run.axes) values[axis] = at?.[axis] ?? null;
    for (const [key, matrix] of matrices) {
      const row = matrix?.rowOf.get(one.rank);
      const mean = matrix && row !== undefined ? rowMean(matrix, row, ...columnsOf(matrix, steps)) : Number.NaN;
      values[key] = Number.isNaN(mean) ? null : mean;
    }
    return { rank: one.rank, values };
  });
}
