// V14: what was measured and what was not: whether the numbers above can be believed.
import { useSignal } from "@preact/signals";
import { isKnown, list, num, reasonOf } from "../data/known";
import { Card } from "../parts/card";
import type { LampState } from "../parts/icons";
import { StateIcon } from "../parts/icons";
import type { Run } from "../state/run";
import { clean, cleanText } from "../text/names";
import { count, duration, plural, ratio } from "../text/units";
import { wordsOf } from "../pages/run_page";

interface Row {
  readonly name: string;
  readonly state: LampState;
  readonly text: string;
}

export function TrustView({ run, span }: { run: Run; span: readonly [number, number] }) {
  const isAll = useSignal(false);
  const rows = rowsOf(run);
  const silent = run.page.rules.filter((rule) => rule.reason !== null);
  const byReason = new Map<string, string[]>();
  for (const rule of silent) byReason.set(rule.reason!, [...(byReason.get(rule.reason!) ?? []), rule.code]);
  return (
    <Card id="trust" title="Can I trust these numbers?" span={span} sub="what was measured, what was not"
      not="a promise: a complete recording can still be of an unusual run"
      table={() => ({ columns: ["subject", "state", "text"], rows: [...rows.map((row) => [row.name, row.state, row.text]), ...silent.map((rule) => [rule.code, "could not look", rule.reason])] })}>
      <table>
        <tbody>
          {rows.map((row) => (
            <tr key={row.name}><td class="nowrap" style={{ width: "1%" }}><StateIcon state={row.state} />  {row.name}</td><td>{cleanText(row.text)}</td></tr>
          ))}
          <tr>
            <td class="nowrap"><StateIcon state={silent.length ? "unknown" : "ok"} />  Rules</td>
            <td>
              {plural(run.page.rules.length, "rule")} ran{silent.length > 0 && <>; {silent.length} could not see all they need <button type="button" class="plain" aria-expanded={isAll.value} onClick={() => (isAll.value = !isAll.value)}>{isAll.value ? "hide" : "why"}</button></>}
              {isAll.value && <ul class="bullets">{[...byReason].map(([reason, codes]) => <li key={reason}><code>{codes.map((code) => clean(code, 12)).join(" ")}</code> {cleanText(reason)}</li>)}</ul>}
            </td>
          </tr>
        </tbody>
      </table>
    </Card>
  );
}

function rowsOf(run: Run): readonly Row[] {
  const { report } = run.page;
  const health = isKnown(report.health) ? report.health : null;
  const communication = isKnown(report.communication) ? report.communication : null;
  const rows: Row[] = [];
  const world = num(report.run.world_size) ?? report.run.num_ranks;
  const isTraces = run.page.meta.is_from_traces;
  const finished = run.page.ranks.filter((rank) => rank.state === "finished").length;
  const problems = list(health?.problems);
  rows.push({
    name: "Ranks", state: world > report.run.num_ranks ? "bad" : (!isTraces && finished < report.run.num_ranks) || problems.length ? "attention" : "ok",
    text: `${report.run.num_ranks} of ${world} ${isTraces ? "have a trace" : `recorded, ${finished} finished`}, ${plural(problems.length, "problem")} in files${problems.length ? `: ${problems.slice(0, 2).map(wordsOf).join("; ")}` : ""}`,
  });
  rows.push(clocksOf(communication?.clocks ?? null, report.run.hosts.length));
  if (communication) {
    const facts = communication.health as Record<string, number>;
    const lost = (facts["num_unmatched"] ?? 0) + (facts["num_lost"] ?? 0) + (facts["num_untrusted"] ?? 0);
    rows.push({ name: "Operations", state: lost || (facts["num_recognised"] ?? 0) < (facts["num_rank_operations"] ?? 0) ? "attention" : "ok", text: `${count(facts["num_recognised"] ?? 0)} of ${count(facts["num_rank_operations"] ?? 0)} recognised, ${count(facts["num_unmatched"] ?? 0)} unmatched, ${count(facts["num_lost"] ?? 0)} lost` });
    const inexact = facts["num_inexact_ends"] ?? 0;
    rows.push({ name: "Ends", state: inexact > 0.2 * (facts["num_rank_operations"] || 1) ? "attention" : "ok", text: inexact ? `${inexact === 1 ? "1 end is an upper bound" : `${count(inexact)} ends are upper bounds`} (${ratio(inexact / (facts["num_rank_operations"] || 1))})` : "every end was seen" });
  } else rows.push({ name: "Operations", state: "unknown", text: reasonOf(report.communication, "none was recorded") });
  const diagnosis = isKnown(report.diagnosis) ? report.diagnosis : null;
  const error = diagnosis?.replay_error_ratio;
  rows.push({ name: "Replay", state: isKnown(error) ? (Math.abs(error) > 0.1 ? "attention" : "ok") : "unknown", text: isKnown(error) ? `reproduces the measured time to within ${ratio(Math.abs(error))}` : reasonOf(error, "no finding was priced by replay") });
  const overhead = health?.overhead;
  rows.push({ name: isTraces ? "Profiler" : "Recorder", state: isKnown(overhead) ? (overhead.median_ratio > 0.02 ? "attention" : "ok") : "unknown", text: isKnown(overhead) ? `costs ${duration(overhead.median_ns)} a step (${ratio(overhead.median_ratio)}), p95 ${ratio(overhead.p95_ratio)}` : reasonOf(overhead) });
  rows.push({ name: "Device time", state: isKnown(report.hardware) || run.page.timelines.some((one) => one.on_device.some(Boolean)) ? "ok" : "unknown", text: run.page.timelines.some((one) => one.on_device.some(Boolean)) ? "spans are of the device's streams" : isKnown(report.hardware) ? "devices were watched" : reasonOf(report.hardware) });
  const mfu = isKnown(report.budget) ? report.budget.mfu : null;
  rows.push({ name: "FLOPs, MFU", state: isKnown(mfu) ? "ok" : "unknown", text: isKnown(mfu) ? `MFU ${ratio(typeof mfu === "number" ? mfu : mfu.ratio)}` : reasonOf(mfu, "not counted") });
  const gaps = run.page.matrices?.left_out ?? [];
  const reasons = new Map<string, number>();
  for (const gap of gaps) reasons.set(gap.reason, (reasons.get(gap.reason) ?? 0) + gap.last_step - gap.first_step + 1);
  rows.push({ name: "Left out", state: "ok", text: reasons.size ? [...reasons].map(([reason, steps]) => `${plural(steps, "step")}: ${reason}`).join("; ") : "no step" });
  const dropped = num(health?.num_dropped);
  const errors = list(health?.errors).length;
  rows.push({ name: "Lost", state: dropped === undefined ? "unknown" : dropped > 0 ? "bad" : "ok", text: dropped === undefined ? reasonOf(health ? health.num_dropped : report.health) : `${plural(dropped, "record")} dropped${errors ? `; ${plural(errors, "error")} of the recorder` : ""}` });
  return rows;
}

function clocksOf(clocks: readonly { host?: string; offset_ns?: unknown; uncertainty_ns?: unknown }[] | null, numHosts: number): Row {
  if (!clocks) return { name: "Clocks", state: "unknown", text: "no operation of several ranks shows how clocks differ" };
  if (clocks.length <= 1 && numHosts <= 1) return { name: "Clocks", state: "ok", text: "one host, one clock: no clock error" };
  const known = clocks.map((clock) => num(clock.uncertainty_ns as number)).filter((value): value is number => value !== undefined);
  const worst = known.length ? Math.max(...known) : undefined;
  return {
    name: "Clocks", state: worst === undefined ? "unknown" : worst > 1e6 ? "attention" : "ok",
    text: worst === undefined ? `${plural(numHosts, "host")}: offsets are not known` : `${plural(clocks.length, "clock")} aligned to ±${duration(worst)} or better${clocks.length < numHosts ? `, of ${plural(numHosts, "host")}` : numHosts === 0 ? "; which hosts they are of is not known" : ""}`,
  };
}

