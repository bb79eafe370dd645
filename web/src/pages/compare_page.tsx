// Two runs: the verdict with its interval, where the difference is, and what differs about the runs.
import { useSignal } from "@preact/signals";
import type { ComparedLine } from "../data/compare";
import { isKnown, list, num } from "../data/known";
import type { ComparedRun, PageDocument } from "../data/page";
import type { Source } from "../data/source";
import { drawText } from "../draw/axis";
import type { Frame, Spot } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import type { Kind } from "../draw/kinds";
import { kindOf } from "../draw/kinds";
import { fillKind } from "../draw/texture";
import { Card } from "../parts/card";
import { Logo } from "../parts/icons";
import { Menu } from "../parts/menu";
import { Facts } from "../parts/tip";
import { copy, save } from "../text/files";
import { linkText } from "../text/markdown";
import { clean, cleanText, sentence } from "../text/names";
import { change, duration, logged, plural, ratio, withUnit } from "../text/units";
import { DifferenceView } from "../views/difference";
import { ThemeButton, isHelpOpen } from "./header";

type Found = NonNullable<PageDocument["compare"]>;

export function ComparePage({ page, compare }: { page: PageDocument; compare: Found; source: Source }) {
  const isSwapped = useSignal(false);
  const sides = isSwapped.value ? ([compare.b, compare.a] as const) : ([compare.a, compare.b] as const);
  const sign = isSwapped.value ? -1 : 1;
  const period = compare.found.metrics.find((one) => one.name === "step period") ?? compare.found.metrics[0];
  const interval = isKnown(period?.interval_ratio) ? period.interval_ratio : null;
  const isCertain = interval !== null && (interval[0] > 0 || interval[1] < 0);
  const tone = page.verdict.tone === "bad" ? "var(--bad)" : page.verdict.tone === "ok" ? "var(--better)" : "var(--line)";
  const shift = num(period?.change_ratio);
  const shown = shift === undefined ? undefined : isSwapped.value ? 1 / (1 + shift) - 1 : shift;
  return (
    <>
      <header class="top"><div class="head">
        <Logo /><h1>Compare</h1>
        <span class="pill">A {clean(lastPart(sides[0].name), 60)}</span><span class="pill">B {clean(lastPart(sides[1].name), 60)}</span>
        <span class="facts">every change is from A to B</span>
        <button type="button" onClick={() => (isSwapped.value = !isSwapped.value)}>⇄ swap</button>
        <Menu id="export" label="Export" text="Export ▾" items={[["Comparison, JSON", () => save("compare.json", JSON.stringify(compare.found, null, 1), "application/json")], ["Print or PDF", () => print()]]} />
        <button type="button" onClick={() => void copy(linkText(), "link")}>Copy link</button>
        <ThemeButton />
        <button type="button" class="icon" aria-label="Keys" onClick={() => (isHelpOpen.value = true)}>?</button>
      </div></header>
      <main><div class="grid">
        <section class="card verdict" id="verdict" aria-label="Verdict" style={{ "--sev": tone }}>
          <div class="words">
            <h2>{isSwapped.value ? "Swapped: every change is from the second run to the first." : sentence(page.verdict.title).replace(/(?<= )-(?=\d)/g, "−")}</h2>
            {page.verdict.text && !isSwapped.value && <p>{cleanText(page.verdict.text)}</p>}
            {period && isKnown(period.a) && isKnown(period.b) && (
              <p>{clean(period.name, 40)} {withUnit(isSwapped.value ? period.b : period.a, period.unit)} → {withUnit(isSwapped.value ? period.a : period.b, period.unit)}
                {isKnown(period.shift) && `; Hodges–Lehmann shift over ${period.shift.num_a} and ${period.shift.num_b} steps`}. It is about these two recordings, not about other launches.</p>
            )}
          </div>
          {shown !== undefined && <div class="price"><strong style={{ color: isCertain ? (shown > 0 ? "var(--worse)" : "var(--better)") : "var(--ink3)" }}>{shown > 0 ? "+" : ""}{ratio(shown)}</strong><span>{period!.name}{isCertain ? "" : ", not certain"}</span></div>}
        </section>
        <Waterfall compare={compare} sign={sign} isSwapped={isSwapped.value} />
        <Metrics compare={compare} isSwapped={isSwapped.value} />
        <DifferenceView a={sides[0]} b={sides[1]} />
        <Losses compare={compare} sign={sign} />
        <Provenance compare={compare} isSwapped={isSwapped.value} sides={sides} />
      </div></main>
    </>
  );
}

/** A run is called by the last part of its path. */
function lastPart(path: string): string {
  return path.replace(/\/+$/, "").split("/").pop() || path;
}

interface Bar {
  readonly name: string;
  readonly kind: Kind;
  readonly ns: number;
  readonly low: number | undefined;
  readonly high: number | undefined;
  readonly isCertain: boolean;
}

function barOf(line: ComparedLine, sign: number): Bar {
  const [low, high] = [num(line.low_ns), num(line.high_ns)];
  const share = line.name.replace(/ (tp|dp|pp|cp|ep|world|other)$/, "");
  const bounds = low === undefined || high === undefined ? [undefined, undefined] : sign > 0 ? [low, high] : [-high, -low];
  return { name: line.name, kind: kindOf(share), ns: sign * (num(line.change_ns) ?? 0), low: bounds[0], high: bounds[1], isCertain: low !== undefined && high !== undefined && (low > 0 || high < 0) };
}

const LABEL = 168;
const VALUES = 150;
const ROW = 28;

function Waterfall({ compare, sign, isSwapped }: { compare: Found; sign: number; isSwapped: boolean }) {
  const { budget } = compare.found;
  if (!isKnown(budget)) return <Card id="waterfall" title="Where the difference is" span={[8, 8]}><p class="dim">The budgets of the two runs cannot be compared.</p></Card>;
  const ends = [num(budget.period.a_ns) ?? 0, num(budget.period.b_ns) ?? 0];
  const [from, to] = isSwapped ? [ends[1]!, ends[0]!] : [ends[0]!, ends[1]!];
  const bars = budget.lines.map((line) => barOf(line, sign)).filter((bar) => Math.abs(bar.ns) > 0);
  let at = from;
  const placed = bars.map((bar) => { const start = at; at += bar.ns; return { ...bar, start, end: at }; });
  const rest = to - at;
  const all = Math.abs(rest) > 0.002 * Math.max(from, to) ? [...placed, { name: "not explained", kind: "unknown" as const, ns: rest, low: undefined, high: undefined, isCertain: false, start: at, end: to }] : placed;
  const lowest = Math.min(from, to, ...all.map((bar) => Math.min(bar.start, bar.end)));
  const highest = Math.max(from, to, ...all.map((bar) => Math.max(bar.start, bar.end)));
  const isBroken = lowest > 0.35 * highest;
  const floor = isBroken ? lowest - 0.25 * (highest - lowest) - 0.02 * highest : 0;
  const height = (all.length + 2) * ROW;
  const x = (ns: number, width: number): number => LABEL + ((ns - floor) / (highest * 1.02 - floor)) * (width - LABEL - VALUES);
  const draw = (frame: Frame): void => {
    const { ctx, width, theme } = frame;
    const whole = (name: string, ns: number, i: number): void => {
      ctx.fillStyle = theme.colours.ink3;
      ctx.fillRect(LABEL, i * ROW + 4, x(ns, width) - LABEL, ROW - 9);
      if (isBroken) {
        ctx.strokeStyle = theme.colours.card;
        ctx.lineWidth = 2.5;
        ctx.beginPath();
        ctx.moveTo(LABEL + 8, i * ROW + 2);
        ctx.lineTo(LABEL + 4, i * ROW + 12);
        ctx.lineTo(LABEL + 10, i * ROW + 12);
        ctx.lineTo(LABEL + 6, i * ROW + ROW - 3);
        ctx.stroke();
      }
      drawText(ctx, theme, name, LABEL - 10, i * ROW + ROW / 2, { align: "right", weight: 640, colour: theme.colours.ink });
      drawText(ctx, theme, duration(ns), x(ns, width) + 7, i * ROW + ROW / 2, { weight: 640, colour: theme.colours.ink });
    };
    whole("A", from, 0);
    all.forEach((bar, k) => {
      const i = k + 1;
      const [a, b] = [x(Math.min(bar.start, bar.end), width), x(Math.max(bar.start, bar.end), width)];
      ctx.globalAlpha = bar.isCertain ? 1 : 0.38;
      fillKind(ctx, bar.kind, theme, a, i * ROW + 5, Math.max(1, b - a), ROW - 11);
      ctx.globalAlpha = 1;
      if (bar.low !== undefined && bar.high !== undefined) {
        ctx.strokeStyle = theme.colours.ink;
        ctx.lineWidth = 1;
        const [lo, hi] = [Math.max(LABEL, Math.min(width - VALUES, x(bar.start + bar.low, width))), Math.max(LABEL, Math.min(width - VALUES, x(bar.start + bar.high, width)))];
        ctx.beginPath();
        ctx.moveTo(lo, i * ROW + ROW / 2);
        ctx.lineTo(hi, i * ROW + ROW / 2);
        ctx.stroke();
      }
      drawText(ctx, theme, bar.name, LABEL - 10, i * ROW + ROW / 2, { align: "right", colour: theme.colours.ink2, maxWidth: LABEL - 14 });
      const colour = !bar.isCertain ? theme.colours.ink3 : bar.ns > 0 ? theme.colours.worse : theme.colours.better;
      drawText(ctx, theme, `${bar.ns > 0 ? "▲" : "▼"} ${change(bar.ns)}${bar.isCertain ? "" : " (not certain)"}`, width - 2, i * ROW + ROW / 2, { align: "right", weight: bar.isCertain ? 640 : 400, colour });
    });
    whole("B", to, all.length + 1);
  };
  const spot = (_x: number, y: number): Spot | null => {
    const bar = all[Math.floor(y / ROW) - 1];
    if (!bar) return null;
    const rows: [string, string][] = [["change", change(bar.ns)]];
    if (bar.low !== undefined && bar.high !== undefined) rows.push(["95 % interval", `${change(bar.low)} to ${change(bar.high)}`]);
    return { tip: <Facts title={clean(bar.name)} rows={rows} />, text: `${bar.name} ${change(bar.ns)}` };
  };
  return (
    <Card id="waterfall" title="Where the difference is" span={[8, 8]} sub="mean per step and rank; bars sum to the change of the mean period; whisker: 95 %; pale: not certain"
      not="a cause: a line may grow because another shrank" table={() => ({ columns: ["line", "change_ns", "low_ns", "high_ns", "certain"], rows: all.map((bar) => [bar.name, bar.ns, bar.low ?? null, bar.high ?? null, bar.isCertain ? "yes" : "no"]) })}>
      <Canvas height={height} draw={draw} spot={spot} label={`From ${duration(from)} to ${duration(to)}: ${all.map((bar) => `${bar.name} ${change(bar.ns)}`).join(", ")}`}
        cursor={(at2, _dx, dy) => [LABEL + 4, Math.min(height - 2, Math.max(ROW / 2, at2 ? at2[1] + dy * ROW : ROW * 1.5))]} />
    </Card>
  );
}

function Metrics({ compare, isSwapped }: { compare: Found; isSwapped: boolean }) {
  const { metrics, loss } = compare.found;
  return (
    <Card id="metrics" title="Metrics" span={[4, 4]} sub="and the loss" not="proof of equality: a change inside of the interval may be there"
      table={() => ({ columns: ["metric", "unit", "a", "b", "change_ratio"], rows: metrics.map((one) => [one.name, one.unit, num(one.a) ?? null, num(one.b) ?? null, num(one.change_ratio) ?? null]) })}>
      <table>
        <thead><tr><th>metric</th><th class="right">A</th><th class="right">B</th><th class="right">change</th></tr></thead>
        <tbody>
          {metrics.map((one) => {
            const [a, b] = isSwapped ? [one.b, one.a] : [one.a, one.b];
            const raw = num(one.change_ratio);
            const moved = raw === undefined ? undefined : isSwapped ? 1 / (1 + raw) - 1 : raw;
            const interval = isKnown(one.interval_ratio) ? one.interval_ratio : null;
            const isCertain = interval !== null && (interval[0] > 0 || interval[1] < 0);
            const isBetter = moved !== undefined && (moved < 0) === one.is_lower_better;
            return (
              <tr key={one.name}>
                <td>{clean(one.name, 40)}</td><td class="right">{isKnown(a) ? withUnit(a, one.unit) : "n/a"}</td><td class="right">{isKnown(b) ? withUnit(b, one.unit) : "n/a"}</td>
                <td class="right">{moved === undefined ? <span class="dim">n/a</span> : <strong style={{ color: isCertain ? (isBetter ? "var(--better)" : "var(--worse)") : "var(--ink3)" }}>{moved > 0 ? "▲ +" : moved < 0 ? "▼ " : ""}{ratio(moved)}</strong>}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {isKnown(loss) && (
        <p>
          {isKnown(loss.first_divergence)
            ? <>Loss first differs in <b>step {loss.first_divergence.step}</b> ({logged(loss.first_divergence.a)} and {logged(loss.first_divergence.b)}); {loss.num_beyond} of {plural(loss.num_values, "value")} differ, at most by {logged(loss.largest_difference)}.</>
            : <>Loss: {plural(loss.num_values, "value")} compared, none differs.</>}
        </p>
      )}
    </Card>
  );
}

function Losses({ compare, sign }: { compare: Found; sign: number }) {
  const { ledger } = compare.found;
  const lines = isKnown(ledger) ? list(ledger.losses).filter((line) => Math.abs(num(line.change_ns) ?? 0) > 0).slice(0, 10) : [];
  if (!lines.length) return null;
  const top = Math.max(...lines.map((line) => Math.abs(num(line.change_ns) ?? 0)));
  return (
    <Card id="losses" title="What is lost differently" span={[7, 8]} sub="losses of a step against the best one, by replay" not="certain: replayed losses have no interval"
      table={() => ({ columns: ["loss", "a_ns", "b_ns", "change_ns"], rows: lines.map((line) => [line.name, num(line.a_ns) ?? null, num(line.b_ns) ?? null, num(line.change_ns) ?? null]) })}>
      <table>
        <tbody>
          {lines.map((line) => {
            const by = sign * (num(line.change_ns) ?? 0);
            return (
              <tr key={line.name}>
                <td>{clean(line.name, 60)}</td>
                <td style={{ width: "34%" }}><div style={{ display: "flex", justifyContent: by < 0 ? "flex-end" : "flex-start", width: "50%", marginLeft: by < 0 ? 0 : "50%" }}><div style={{ height: "10px", width: `${(100 * Math.abs(by)) / top}%`, background: by > 0 ? "var(--worse)" : "var(--better)" }} /></div></td>
                <td class="right"><strong>{by > 0 ? "▲" : "▼"} {change(by)}</strong></td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Card>
  );
}

function Provenance({ compare, isSwapped, sides }: { compare: Found; isSwapped: boolean; sides: readonly [ComparedRun, ComparedRun] }) {
  const rows = list(compare.found.provenance);
  const text = (value: unknown): string => (value === null || value === undefined ? "·" : isKnown(value) ? (typeof value === "string" ? value : JSON.stringify(value)) : "not known");
  return (
    <Card id="provenance" title="What is different about the runs" span={[5, 4]} sub="no cause is claimed" table={() => ({ columns: ["subject", "name", "a", "b"], rows: rows.map((row) => [row.subject, row.name, text(row.a), text(row.b)]) })}>
      <div class="scroll" tabIndex={0} role="region" aria-label="What is different">
        <table class="even">
          <thead><tr><th>what</th><th>A {clean(lastPart(sides[0].name), 20)}</th><th>B {clean(lastPart(sides[1].name), 20)}</th></tr></thead>
          <tbody>
            {rows.map((row, i) => (
              <tr key={i}><td>{clean(row.name, 40)}<br /><span class="dim">{clean(row.subject, 30)}</span></td>
                <td class="mono">{clean(text(isSwapped ? row.b : row.a), 120)}</td><td class="mono">{clean(text(isSwapped ? row.a : row.b), 120)}</td></tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length === 0 && <p class="dim">nothing that was recorded differs</p>}
    </Card>
  );
}
