// What was predicted before the run, against what it did: the step, lines of the budget, memory.
import { isKnown, num, reasonOf } from "../data/known";
import type { CheckedTime, Prediction } from "../data/report";
import { Card } from "../parts/card";
import { hover } from "../parts/tip";
import { Words } from "../parts/words";
import type { Cell } from "../text/files";
import { clean } from "../text/names";
import { change, duration, memory, ratio } from "../text/units";

interface Row {
  readonly name: string;
  readonly predicted: number;
  readonly measured: number | undefined;
  /** Why nothing was measured. */
  readonly reason: string;
}

export function PredictionView({ check, span }: { check: Prediction; span: readonly [number, number] }) {
  const step = isKnown(check.step) ? check.step : null;
  const times = step ? [...check.lines, step].map(rowOf) : [];
  const sizes = check.memory.map((one): Row => ({ name: `pp rank ${one.pp_rank}`, predicted: one.predicted_bytes, measured: num(one.measured_bytes), reason: reasonOf(one.measured_bytes) }));
  const width = isKnown(check.interval_ratio) ? ` ± ${ratio(check.interval_ratio)}` : "";
  const judged = step ? `; the measured step is ${check.is_within === true ? "inside" : "outside"} of the predicted${width}` : "";
  return (
    <Card id="prediction" title="Predicted and measured" span={span} sub={`stored before the first step${judged}${isKnown(check.calibrated_on) ? `; calibrated on ${clean(check.calibrated_on, 60)}` : ""}`}
      not="a check of the run: what is left over may be a slow rank, which findings name, or the prediction's own error"
      table={() => ({ columns: ["what", "unit", "predicted", "measured"], rows: [...tableRows(times, "ns"), ...tableRows(sizes, "bytes")] })}>
      <div class="columns">
        {times.length > 0 ? <Bars label="time of a step" rows={times} show={duration} left={change} /> : <p class="dim">Step time was not predicted: <Words text={reasonOf(check.step)} /></p>}
        {sizes.length > 0 && <Bars label="tensors at their peak" rows={sizes} show={memory} left={(bytes) => `${bytes > 0 ? "+" : ""}${memory(bytes)}`} />}
      </div>
    </Card>
  );
}

function rowOf(one: CheckedTime): Row {
  return { name: one.name, predicted: one.predicted_ns, measured: one.measured_ns, reason: "" };
}

function tableRows(rows: readonly Row[], unit: string): readonly (readonly Cell[])[] {
  return rows.map((row) => [row.name, unit, row.predicted, row.measured ?? null]);
}

/** What was measured as a bar, what was predicted as a mark on it. */
function Bars({ label, rows, show, left }: { label: string; rows: readonly Row[]; show: (value: number) => string; left: (value: number) => string }) {
  const top = Math.max(1e-9, ...rows.flatMap((row) => [row.predicted, row.measured ?? 0]));
  return (
    <table>
      <thead><tr><th>{label}</th><th style={{ width: "34%" }}>measured, mark: predicted</th><th class="right">predicted</th><th class="right">measured</th><th class="right">left over</th></tr></thead>
      <tbody>
        {rows.map((row) => (
          <tr key={row.name}>
            <td>{clean(row.name, 30)}</td>
            <td><div class="against">{row.measured !== undefined && <div style={{ width: `${(100 * row.measured) / top}%` }} />}<i style={{ left: `${(100 * row.predicted) / top}%` }} /></div></td>
            <td class="right">{show(row.predicted)}</td>
            <td class="right">{row.measured === undefined ? <span class="dim" {...hover(() => row.reason)}>not known</span> : show(row.measured)}</td>
            <td class="right"><strong>{row.measured === undefined ? "" : left(row.measured - row.predicted)}</strong></td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
