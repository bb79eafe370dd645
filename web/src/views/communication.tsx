// V9: what holds ranks up along each axis, what is hidden, and who comes last.
import { useSignal } from "@preact/signals";
import { isKnown, list } from "../data/known";
import type { Communication, Exposure } from "../data/report";
import { Card } from "../parts/card";
import { hover } from "../parts/tip";
import { go, state } from "../state/fragment";
import type { Run } from "../state/run";
import { expandRanks } from "../state/run";
import { chosenAxis, chosenRanks, selectRanks } from "../state/scope";
import { clean, ranges } from "../text/names";
import { count, duration, memory, plural, ratio } from "../text/units";

export function CommunicationView({ run, communication, span }: { run: Run; communication: Communication; span: readonly [number, number] }) {
  const open = useSignal<string>(state.value.ax);
  const axes = [...communication.axes].sort((a, b) => b.per_rank_step.exposed_ns - a.per_rank_step.exposed_ns);
  const top = Math.max(1, ...axes.map((axis) => axis.per_rank_step.exposed_ns + axis.per_rank_step.overlapped_ns));
  const toggle = (axis: string): void => {
    open.value = open.value === axis ? "" : axis;
    go({ ax: chosenAxis.value === axis ? "" : axis });
  };
  const late = list(communication.last_arrivers).filter((one) => one.axis !== "all" || communication.axes.length === 0)
    .filter((one) => !chosenAxis.value || one.axis === chosenAxis.value)
    .filter((one) => chosenRanks.value.size === 0 || chosenRanks.value.has(one.rank)).slice(0, 6);
  return (
    <Card id="communication" title="Communication by axis" span={span} sub="per rank and step: what holds ranks up, what is hidden"
      not="time on the wire alone: exposed wait is a rank that came late, not a slow network"
      table={() => ({
        columns: ["axis", "kind", "exposed_transfer_ns", "exposed_wait_ns", "hidden_ns", "exposed_ratio", "operations", "data_bytes"],
        rows: [...axes.map((one) => ["", one] as const), ...list(communication.kinds).map((one) => [one.kind, one] as const)].map(([kind, one]) => [
          one.axis, kind, one.per_rank_step.exposed_transfer_ns, one.per_rank_step.exposed_wait_ns, one.per_rank_step.overlapped_ns,
          isKnown(one.per_rank_step.exposed_ratio) ? one.per_rank_step.exposed_ratio : null, one.total.num_operations, one.total.size_bytes]),
      })}>
      <table>
        <thead><tr><th>axis</th><th style={{ width: "38%" }} /><th class="right">exposed</th><th class="right">of step</th><th class="right">hidden</th><th class="right">data</th></tr></thead>
        <tbody>
          {axes.map((axis) => {
            const isOpen = open.value === axis.axis;
            const kinds = list(communication.kinds).filter((kind) => kind.axis === axis.axis);
            return [
              <tr key={axis.axis} class={chosenAxis.value === axis.axis ? "chosen" : ""}>
                <td class="nowrap">
                  <button type="button" class="plain" aria-expanded={isOpen} onClick={() => toggle(axis.axis)}>{isOpen ? "▾" : "▸"} <b>{clean(axis.axis, 16)}</b> <span class="dim">{plural(axis.num_groups, "group")}</span></button>
                </td>
                <td><ExposureBar exposure={axis.per_rank_step} top={top} /></td>
                <ExposureCells exposure={axis.per_rank_step} bytes={axis.total.size_bytes} />
              </tr>,
              ...(isOpen ? kinds.map((kind) => (
                <tr key={`${axis.axis} ${kind.kind}`}>
                  <td class="nowrap">  <span class="dim">{clean(kind.kind, 24)} × {count(kind.total.num_operations)}</span></td>
                  <td><ExposureBar exposure={kind.per_rank_step} top={top} /></td>
                  <ExposureCells exposure={kind.per_rank_step} bytes={kind.total.size_bytes} />
                </tr>
              )) : []),
              ...(isOpen ? [<tr key={`${axis.axis} slow`}><td colSpan={6}><Slowest communication={communication} axis={axis.axis} /></td></tr>] : []),
            ];
          })}
        </tbody>
      </table>
      <div class="legend">
        <span><span class="swatch k-transfer" />exposed transfer: the network</span>
        <span><span class="swatch k-wait" />exposed wait: somebody was late</span>
        <span><span class="swatch" style={{ background: "repeating-linear-gradient(90deg, var(--ink3) 0 1px, transparent 1px 3px)" }} />hidden behind compute</span>
      </div>
      {late.length > 0 && (
        <table>
          <thead><tr><th>last to arrive</th><th class="right">times</th><th class="right">by chance</th><th class="right">held up by it alone</th><th class="right">others waited</th></tr></thead>
          <tbody>
            {late.map((one) => (
              <tr key={`${one.axis} ${one.rank}`}>
                <td>
                  <button type="button" class="plain" onClick={(event) => selectRanks([one.rank], event.shiftKey)}><b>rank {one.rank}</b></button>
                  <span class="dim"> {clean(one.axis, 16)}{one.phase ? `, in ${clean(one.phase, 24)}` : ""}{run.place(one.rank) ? `, ${run.place(one.rank)}` : ""}</span>
                </td>
                <td class="right">{count(one.num_last)} / {count(one.num_operations)}{one.is_beyond_chance ? "" : <span class="dim"> (may be chance)</span>}</td>
                <td class="right dim">{one.expected_last.toFixed(1)}</td>
                <td class="right"><strong>{duration(one.cost_ns)}</strong></td>
                <td class="right">{duration(one.caused_wait_ns)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Card>
  );
}

function ExposureBar({ exposure, top }: { exposure: Exposure; top: number }) {
  const width = (ns: number): string => `${(100 * ns) / top}%`;
  const words = `exposed transfer ${duration(exposure.exposed_transfer_ns)}, exposed wait ${duration(exposure.exposed_wait_ns)}, hidden ${duration(exposure.overlapped_ns)}`;
  return (
    <div style={{ display: "flex", height: "13px", minWidth: "60px" }} role="img" aria-label={words} {...hover(() => words)}>
      <div class="k-transfer" style={{ width: width(exposure.exposed_transfer_ns) }} />
      <div class="k-wait" style={{ width: width(exposure.exposed_wait_ns) }} />
      {exposure.exposed_unsplit_ns > 0 && <div class="k-unknown" style={{ width: width(exposure.exposed_unsplit_ns) }} />}
      <div style={{ width: width(exposure.overlapped_ns), background: "repeating-linear-gradient(90deg, var(--ink3) 0 1px, transparent 1px 3px)" }} />
    </div>
  );
}

function ExposureCells({ exposure, bytes }: { exposure: Exposure; bytes: number }) {
  return (
    <>
      <td class="right"><strong>{duration(exposure.exposed_ns)}</strong></td>
      <td class="right">{isKnown(exposure.exposed_ratio) ? ratio(exposure.exposed_ratio) : "n/a"}</td>
      <td class="right">{duration(exposure.overlapped_ns)}</td>
      <td class="right">{memory(bytes)}</td>
    </>
  );
}

function Slowest({ communication, axis }: { communication: Communication; axis: string }) {
  const found = list(communication.slowest).filter((one) => one.group.axis === axis).slice(0, 5);
  if (!found.length) return <span class="dim">none of the slowest operations is on this axis</span>;
  return (
    <table>
      <thead><tr><th>slowest operations</th><th>group</th><th class="right">step</th><th class="right">size</th><th class="right">wait</th><th class="right">transfer</th><th class="right">last</th></tr></thead>
      <tbody>
        {found.map((one) => (
          <tr key={`${one.group.name} ${one.kind} ${one.sequence}`}>
            <td class="nowrap">{clean(one.kind, 24)} #{one.sequence}</td>
            <td class="dim">ranks {ranges(expandRanks(one.group.ranks), 2)}</td>
            <td class="right">{isKnown(one.step) ? <button type="button" class="plain" onClick={() => go({ st: one.step as number, z: null })}>{one.step}</button> : "n/a"}</td>
            <td class="right">{memory(one.size_bytes)}</td>
            <td class="right">{duration(one.wait_ns)}</td>
            <td class="right">{duration(one.max_transfer_ns)}</td>
            <td class="right">{isKnown(one.last_rank) ? one.last_rank : "n/a"}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
