import type { Table } from "../text/files";
import { cleanText } from "../text/names";
import { count, withUnit } from "../text/units";

const MAX_ROWS = 200;

/** The form of a picture for those who do not see it; above 200 rows the file has the rest. */
export function DataTable({ table, label }: { table: Table; label: string }) {
  const rows = table.rows.slice(0, MAX_ROWS);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={`${label}, as table`}>
      <table>
        <thead><tr>{table.columns.map((name, i) => <th key={i} class={isNumeric(table, i) ? "right" : ""}>{wordsOf(name)}</th>)}</tr></thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={i}>{row.map((cell, k) => <td key={k} class={typeof cell === "number" ? "right" : ""}>{show(table.columns[k] ?? "", cell)}</td>)}</tr>
          ))}
        </tbody>
      </table>
      {table.rows.length > MAX_ROWS && <p class="note">{count(table.rows.length - MAX_ROWS)} more rows: save the CSV.</p>}
    </div>
  );
}

function isNumeric(table: Table, column: number): boolean {
  return typeof table.rows[0]?.[column] === "number";
}

const UNITS: readonly [string, string][] = [["_ns", "ns"], ["_bytes_per_s", "bytes_per_s"], ["_bytes", "bytes"], ["_ratio", "ratio"]];

function wordsOf(column: string): string {
  const unit = UNITS.find(([end]) => column.endsWith(end));
  return (unit ? column.slice(0, -unit[0].length) : column).replaceAll("_", " ");
}

function show(column: string, cell: string | number | null): string {
  if (cell === null) return "not known";
  if (typeof cell === "string") return cleanText(cell);
  const unit = UNITS.find(([end]) => column.endsWith(end));
  return unit ? withUnit(cell, unit[1]) : withUnit(cell, "");
}
