// `dp=3 host~node1 excess>5ms`: terms that a row must all meet; numbers and ranges are ranks.
import { parseRanges } from "../state/fragment";
import type { Cell } from "./files";

export interface Column {
  readonly key: string;
  readonly label: string;
  /** `ns`, `bytes`, `text`, or empty for a plain number. */
  readonly unit: string;
  /** Of the column's name in a file. */
  readonly suffix: string;
}

interface Row {
  readonly rank: number;
  readonly values: Readonly<Record<string, Cell>>;
}

const FACTORS: Readonly<Record<string, number>> = {
  ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9, kib: 1024, mib: 1024 ** 2, gib: 1024 ** 3, kb: 1e3, mb: 1e6, gb: 1e9, b: 1, "": 1,
};

export function filterRows<T extends Row>(rows: readonly T[], columns: readonly Column[], text: string): { readonly kept: readonly T[]; readonly problem: string } {
  const terms = text.trim().split(/\s+/).filter(Boolean);
  const tests: ((row: T) => boolean)[] = [];
  for (const term of terms) {
    const found = /^([\w]+)(=|~|>=|<=|>|<)(.+)$/.exec(term);
    if (!found) {
      const ranks = new Set(parseRanges(term));
      if (!ranks.size) return { kept: rows, problem: `“${term.slice(0, 40)}” is neither ranks (5,12-15) nor a term such as dp=3, host~node1, excess>5ms` };
      tests.push((row) => ranks.has(row.rank));
      continue;
    }
    const [, key, sign, given] = found as unknown as [string, string, string, string];
    const column = columns.find((one) => one.key === key.toLowerCase());
    if (!column) return { kept: rows, problem: `there is no column “${key.slice(0, 40)}”; there are ${columns.map((one) => one.key).join(", ")}` };
    const number = parseAmount(given);
    if (sign === "~") tests.push((row) => String(row.values[column.key] ?? "").toLowerCase().includes(given.toLowerCase()));
    else if (column.unit === "text" || number === null) tests.push((row) => sign === "=" && String(row.values[column.key] ?? "").toLowerCase() === given.toLowerCase());
    else tests.push((row) => compare(row.values[column.key] ?? null, sign, number));
  }
  return { kept: rows.filter((row) => tests.every((test) => test(row))), problem: "" };
}

function parseAmount(text: string): number | null {
  const found = /^(-?[\d.]+)\s*([a-zµ]*)$/i.exec(text);
  const factor = found ? FACTORS[found[2]!.toLowerCase()] : undefined;
  const value = found ? Number(found[1]) * (factor ?? Number.NaN) : Number.NaN;
  return Number.isNaN(value) ? null : value;
}

function compare(value: Cell, sign: string, number: number): boolean {
  if (typeof value !== "number") return false;
  switch (sign) {
    case ">": return value > number;
    case "<": return value < number;
    case ">=": return value >= number;
    case "<=": return value <= number;
    default: return value === number;
  }
}
