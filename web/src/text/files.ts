// What is written to files and to the clipboard: tables of what is shown, with its scope.
import { signal } from "@preact/signals";
import { cleanText } from "./names";

export type Cell = string | number | null;

export interface Table {
  /** Names of columns with their units: "wait_ns". */
  readonly columns: readonly string[];
  readonly rows: readonly (readonly Cell[])[];
}

export const toast = signal("");
let timer: ReturnType<typeof setTimeout> | undefined;

export function notify(text: string): void {
  toast.value = text;
  clearTimeout(timer);
  timer = setTimeout(() => (toast.value = ""), 2500);
}

/** A cell that a spreadsheet does not take for a formula. */
export function csvCell(value: Cell): string {
  if (value === null) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = cleanText(value);
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n']/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function makeCsv(table: Table, scope: string): string {
  const lines = [`# ${cleanText(scope)}`, table.columns.map(csvCell).join(",")];
  for (const row of table.rows) lines.push(row.map(csvCell).join(","));
  return `${lines.join("\n")}\n`;
}

export function makeJson(table: Table, scope: string): string {
  const rows = table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i] ?? null])));
  return `${JSON.stringify({ scope, rows }, null, 1)}\n`;
}

export function save(name: string, content: string | Blob, type = "text/plain"): void {
  const blob = typeof content === "string" ? new Blob([content], { type: `${type};charset=utf-8` }) : content;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replaceAll(/[^\w.-]+/g, "_").slice(0, 100);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function copy(text: string, what: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    notify(`${what} copied`);
  } catch {
    // No clipboard where the page is not a secure context: a selection can always be copied.
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("aria-hidden", "true");
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    notify(isCopied ? `${what} copied` : "the browser did not allow copying");
  }
}
