// The run's name and facts, what can be done with the page, tabs, and the brushable strip of steps.
import { signal } from "@preact/signals";
import { address, base, servedRun } from "../data/http";
import { isKnown } from "../data/known";
import { drawText } from "../draw/axis";
import type { Frame } from "../draw/canvas";
import { Canvas } from "../draw/canvas";
import { theme } from "../draw/theme";
import { Logo, severityRank } from "../parts/icons";
import type { MenuItem } from "../parts/menu";
import { Menu } from "../parts/menu";
import { reveal } from "../state/findings";
import { go, state } from "../state/fragment";
import type { Run } from "../state/run";
import { clearSelection, selectSteps } from "../state/scope";
import { copy, save } from "../text/files";
import { linkText } from "../text/markdown";
import { clean, cleanText, nameRanks } from "../text/names";
import { duration, moment, plural } from "../text/units";
import { clampStep } from "../views/step_budget";
import { News, StatePill } from "./live_pill";

export const isHelpOpen = signal(false);

export interface Tab {
  readonly name: string;
  readonly section: string;
  /** The key that leads there. */
  readonly key: number;
}

export const currentTab = signal("verdict");

export function ThemeButton() {
  const next = theme.value.name === "dark" ? "light" : "dark";
  return <button type="button" class="icon" aria-label={`Switch to the ${next} theme`} title="t" onClick={() => go({ t: next })}>◐</button>;
}

export function Header({ run }: { run: Run }) {
  const { report, meta } = run.page;
  const layout = isKnown(report.layout) && run.axes.length ? ["dp", "tp", "pp", "cp", "ep"].filter((axis) => run.axes.includes(axis)).map((axis) => `${axis}${(report.layout as { degrees: Record<string, number> }).degrees[axis]}`).join("×") : "";
  const hosts = report.run.hosts.length;
  const facts = [
    plural(report.steps.num_steps, "step"), `${plural(report.run.num_ranks, "rank")}${layout ? ` ${layout}` : ""}`,
    hosts === 0 ? "" : hosts === 1 ? clean(report.run.hosts[0]?.host ?? "1 host", 40) : plural(hosts, "host"),
    isKnown(report.run.device_name) ? clean(report.run.device_name, 40) : meta.is_from_traces ? "" : "no accelerator",
    isKnown(report.run.started_unix_ns) ? moment(report.run.started_unix_ns) : "",
    meta.is_from_traces ? "from traces" : "",
  ].filter(Boolean).join(" · ");
  return (
    <header class="top">
      <div class="head">
        {base === null ? <Logo /> : <a href={base} aria-label="All runs" title="All runs"><Logo /></a>}
        <h1 title={cleanText(meta.title)}>{clean(meta.title, 80)}</h1>
        {meta.state && <StatePill state={meta.state.kind} text={meta.state.text} />}
        <span class="facts">{facts}{meta.is_redacted && " · hosts, paths and command lines are left out"}</span>
        <News />
        {servedRun !== null && <a class="button" href={`${base}?compare=${encodeURIComponent(servedRun)}`}>Compare…</a>}
        <Menu id="export" label="Export" text="Export ▾" items={exportItems(run)} />
        <button type="button" onClick={() => void copy(linkText(), "link")}>Copy link</button>
        <ThemeButton />
        <button type="button" class="icon" aria-label="Keys" onClick={() => (isHelpOpen.value = true)}>?</button>
      </div>
    </header>
  );
}

export function exportItems(run: Run): readonly MenuItem[] {
  return [
    ["Report, JSON", () => save(`${run.page.meta.title}.json`, JSON.stringify(run.page.report, null, 1), "application/json")],
    ["Data of this page, JSON", () => save(`${run.page.meta.title}.page.json`, JSON.stringify(run.page), "application/json")],
    servedRun !== null ? ["This page, HTML", () => location.assign(address(`api/v1/runs/${encodeURIComponent(servedRun!)}/page.html`))] : ["This page, HTML", () => save(`${run.page.meta.title}.html`, new Blob(["<!doctype html>\n", pristine()], { type: "text/html" }))],
    ["Print or PDF", () => print()],
  ];
}

/** The file as it came, before anything was drawn. */
function pristine(): string {
  const page = document.documentElement.cloneNode(true) as HTMLElement;
  page.querySelector("#meshscope-page")?.replaceChildren();
  page.removeAttribute("data-theme");
  return page.outerHTML;
}

export function Strip({ run, tabs }: { run: Run; tabs: readonly Tab[] }) {
  const { r, s, ax } = state.value;
  return (
    <nav class="strip" aria-label="Sections and steps">
      <div>
        <div class="tabs">
          {tabs.map((tab) => (
            <button key={tab.section} type="button" aria-current={currentTab.value === tab.section} title={`${tab.key}`}
              onClick={() => { go({ v: tab.section }); reveal(tab.section); }}>{tab.name}</button>
          ))}
        </div>
        <StepStrip run={run} />
        <div class="chips">
          {s ? <button type="button" class="pill" aria-label="Clear the steps" onClick={() => go({ s: null })}>{s[0] === s[1] ? `step ${s[0]}` : `steps ${s[0]}–${s[1]}`} ×</button> : <span class="pill">all {plural(run.page.report.steps.num_steps, "step")}</span>}
          {r.length > 0 && <button type="button" class="pill" aria-label="Clear the ranks" onClick={() => go({ r: [] })}>{nameRanks(r)} ×</button>}
          {ax && <button type="button" class="pill" aria-label="Clear the axis" onClick={() => go({ ax: "" })}>{clean(ax, 20)} ×</button>}
          {(r.length > 1 || (r.length > 0 && s)) && <button type="button" class="plain" onClick={clearSelection}>clear</button>}
        </div>
      </div>
    </nav>
  );
}

function StepStrip({ run }: { run: Run }) {
  void run.stepTick.value;
  const curve = run.page.series.find((one) => one.key === "step");
  if (!curve || curve.step.length < 2) return <div class="steps" />;
  const [first, last] = run.stepRange;
  const x = (step: number, width: number): number => ((step - first) / Math.max(1, last - first + 1)) * width;
  const stepAt = (px: number, width: number): number => clampStep(Math.floor(first + (px / width) * (last - first + 1)), run);
  const sorted = curve.high.map((value) => value ?? 0).sort((a, b) => a - b);
  const top = Math.min(sorted[sorted.length - 1]!, 3 * sorted[sorted.length >> 1]!) || 1;
  const marked = run.findings.filter((one) => one.first_step !== null && severityRank(one.severity) > 1).slice(0, 3);
  const draw = ({ ctx, width, height, theme: shown }: Frame): void => {
    for (const one of marked) {
      const [a, b] = [x(one.first_step!, width), x((one.last_step ?? last) + 1, width)];
      ctx.globalAlpha = 0.12;
      ctx.fillStyle = shown.colours.bad;
      ctx.fillRect(a, 0, Math.max(2, b - a), height);
      ctx.globalAlpha = 1;
      ctx.fillRect(a, 0, 1.5, height);
    }
    ctx.strokeStyle = shown.colours.ink;
    ctx.lineWidth = 1.2;
    ctx.beginPath();
    curve.step.forEach((step, i) => {
      const mean = curve.mean[i];
      if (mean === null || mean === undefined) return;
      const at = x(step + 0.5, width);
      const y = height - 12 - (Math.min(mean, top) / top) * (height - 15);
      if (i && step - curve.step[i - 1]! <= Math.max(2, (2.5 * (last - first)) / curve.step.length)) ctx.lineTo(at, y);
      else ctx.moveTo(at, y);
    });
    ctx.stroke();
    const { s } = state.value;
    if (s) {
      ctx.strokeStyle = shown.colours.ink;
      ctx.lineWidth = 2;
      ctx.strokeRect(x(s[0], width) + 1, 1, Math.max(2, x(s[1] + 1, width) - x(s[0], width) - 2), height - 2);
    }
    drawText(ctx, shown, `step time, 0 to ${sorted[sorted.length - 1]! > 1.01 * top ? "≥ " : ""}${duration(top)}`, 2, height - 5, { size: 10.5, plate: shown.colours.bg });
    const mark = marked[0];
    if (mark) drawText(ctx, shown, `◂ ${mark.code}, from step ${mark.first_step}`, Math.min(x(mark.first_step!, width) + 4, width - 120), height - 5, { size: 10.5, colour: shown.colours.bad, plate: shown.colours.bg });
  };
  return (
    <div class="steps">
      <Canvas height={34} label={`Step time over steps ${first} to ${last}; drag to select steps`} draw={draw}
        spot={(px, _y, width) => {
          const step = stepAt(px, width);
          let i = curve.step.findIndex((at) => at > step) - 1;
          if (i < 0) i = curve.step.length - 1;
          const mean = curve.mean[i];
          const text = `step ${step}: ${mean === null || mean === undefined ? "not known" : duration(mean)}`;
          return { tip: text, text, box: [x(step, width), 1, Math.max(1, x(step + 1, width) - x(step, width)), 32] };
        }}
        drag={(a, b, width, isDone) => selectSteps(stepAt(a, width), stepAt(b, width), isDone)}
        click={(px, _y, width) => go({ st: stepAt(px, width), z: null })}
        cursor={(at, dx, _dy, width) => [Math.min(width - 1, Math.max(1, (at ? at[0] : 0) + dx * Math.max(2, width / (last - first + 1)))), 17]} />
    </div>
  );
}
