// One run: a sentence first, then what it rests on, in order of importance.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { base } from "../data/http";
import { isKnown, list, num, reasonOf } from "../data/known";
import { StateIcon } from "../parts/icons";
import { live } from "../state/live";
import type { Run } from "../state/run";
import { cleanText } from "../text/names";
import { plural } from "../text/units";
import { BandwidthView } from "../views/bandwidth";
import { BubbleView } from "../views/bubble";
import { CommunicationView } from "../views/communication";
import { Findings } from "../views/findings";
import { HeatView } from "../views/heat";
import { MemoryView } from "../views/memory";
import { MeshView } from "../views/mesh";
import { PairsView } from "../views/pairs";
import { PredictionView } from "../views/prediction";
import { RankBudgetView } from "../views/rank_budget";
import { RanksView } from "../views/ranks";
import { StepBudgetView } from "../views/step_budget";
import { TimelineView } from "../views/timeline";
import { TrainingView } from "../views/training";
import { TrustView } from "../views/trust";
import { Lamps, Verdict } from "../views/verdict";
import { WaitsView } from "../views/waits";
import type { Tab } from "./header";
import { Header, Strip, currentTab } from "./header";

export function tabsOf(): readonly Tab[] {
  return [
    { name: "Overview", section: "verdict", key: 1 },
    { name: "Ranks", section: "heat", key: 2 },
    { name: "Pipeline", section: "timeline", key: 3 },
    { name: "Communication", section: "communication", key: 4 },
    { name: "Memory", section: "memory", key: 5 },
    { name: "Training", section: "training", key: 6 },
    { name: "Trust", section: "trust", key: 7 },
  ];
}

/** Whether the verdict is on the screen: what is below it is drawn after that. */
const isPainted = signal(false);

function notePaint(): void {
  requestAnimationFrame(() => setTimeout(() => (isPainted.value = true)));
}

export function RunView({ run }: { run: Run }) {
  const { report, meta, hang } = run.page;
  const hasPipeline = isKnown(report.pipeline);
  const hasBudget = isKnown(report.budget);
  const hasTimeline = run.page.timelines.length > 0 || run.source.isLive;
  const communication = isKnown(report.communication) ? report.communication : null;
  const hasAxes = Boolean(communication?.axes.length);
  const hasBandwidth = Boolean(communication?.bandwidth.length);
  const hasPairs = Boolean(communication?.messages.length);
  const hasTraining = run.page.series.some((one) => one.group === "training" || one.group === "logged");
  const hasMatrices = (run.page.matrices?.layers.length ?? 0) > 0 && run.rankNumbers.length > 1;
  const hasMesh = hasMatrices && run.axes.length > 0;
  const prediction = isKnown(report.prediction) && (isKnown(report.prediction.step) || report.prediction.memory.length > 0) ? report.prediction : null;
  const absent: [string, string][] = [];
  if (!hasPipeline) absent.push(["Bubble", reasonOf(report.pipeline, "no pipeline: pp is 1")]);
  if (!hasTimeline) absent.push(["One step", "no step is on a timeline"]);
  if (!hasAxes) absent.push(["Communication", reasonOf(report.communication, "no operation was recorded")]);
  if (hasAxes && !hasBandwidth) absent.push(["Bandwidth", "no operation's transfer is known"]);
  if (!hasPairs) absent.push(["Pairs", "no message between two ranks was recorded"]);
  if (!hasTraining) absent.push(["Training", "no loss, gradient norm or learning rate was recorded"]);
  if (!hasMatrices) absent.push(["Who is slow", run.rankNumbers.length === 1 ? "there is only one rank, and no other to compare it with" : "no number by rank and step is known"]);
  else if (!hasMesh) absent.push(["Mesh", isKnown(report.layout) ? "no axis has a degree above 1" : `layout not known: ${reasonOf(report.layout)}`]);
  const missing = new Set([hasTraining ? "" : "training", hasTimeline ? "" : "timeline", hasMatrices ? "" : "heat", hasAxes ? "" : "communication"]);
  useEffect(notePaint, []);
  useEffect(watchScroll, []);
  const memorySpan: readonly [number, number] = hasTraining ? [12, 5] : [12, 8];
  return (
    <>
      <Header run={run} />
      <Strip run={run} tabs={tabsOf().filter((tab) => !missing.has(tab.section)).map((tab) => (tab.section === "timeline" && !hasPipeline ? { ...tab, name: "One step" } : tab))} />
      <main class={live.value?.lostAt ? "greyed" : ""} aria-busy={!isPainted.value}>
        <div class="grid">
          {!hang?.is_stuck && <Banners run={run} />}
          <Verdict run={run} />
          {hang?.is_stuck && <WaitsView run={run} hang={hang} />}
          {hang?.is_stuck && <Banners run={run} />}
          <Lamps run={run} />
          {isPainted.value && <>
          {hasBudget && <StepBudgetView run={run} span={[7, 8]} />}
          <Findings run={run} span={hasBudget ? [5, 4] : [12, 12]} />
          {hasMatrices && <HeatView run={run} span={hasMesh ? [12, 9] : [12, 12]} />}
          {hasMesh && <MeshView run={run} span={[4, 3]} />}
          {hasBudget && run.rankNumbers.length > 1 && <RankBudgetView run={run} span={hasMesh ? [8, hasPipeline ? 3 : 4] : [12, hasPipeline ? 3 : 4]} />}
          {hasTimeline && <TimelineView run={run} span={[12, hasPipeline ? (run.rankNumbers.length > 1 ? 6 : 9) : run.rankNumbers.length > 1 && hasBudget ? 8 : 12]} />}
          {hasPipeline && isKnown(report.pipeline) && <BubbleView run={run} pipeline={report.pipeline} span={[12, 3]} />}
          {communication && hasAxes && <CommunicationView run={run} communication={communication} span={hasBandwidth ? [hasPairs ? 12 : 7, hasPairs ? 5 : 7] : [12, 12]} />}
          {communication && hasBandwidth && <BandwidthView run={run} communication={communication} span={hasPairs ? [7, 4] : [5, 5]} />}
          {communication && hasPairs && <PairsView run={run} communication={communication} span={[5, 3]} />}
          {hasTraining && <TrainingView run={run} span={[6, 4]} />}
          {hasTraining && <TrustView run={run} span={[6, 3]} />}
          <MemoryView run={run} span={memorySpan} />
          {!hasTraining && <TrustView run={run} span={[12, 4]} />}
          {prediction && <PredictionView check={prediction} span={[12, 12]} />}
          <RanksView run={run} span={[12, 12]} />
          {absent.length > 0 && <div class="lines">{absent.map(([name, why]) => <span key={name}><b>{name}</b>: {cleanText(why)}</span>)}</div>}
          {meta.left_out.length > 0 && <div class="lines"><span><b>Not in this page</b>: {meta.left_out.map(cleanText).join("; ")}; open the run with <code>meshscope serve</code>.</span></div>}
          <div class="lines"><span>meshscope {cleanText(report.meshscope_version)}; {base === null ? "a page without network: everything is in this file." : "served; export it to keep it."}</span></div>
          </>}
        </div>
      </main>
    </>
  );
}

function Banners({ run }: { run: Run }) {
  const { report } = run.page;
  const found: string[] = [];
  const health = isKnown(report.health) ? report.health : null;
  const world = isKnown(report.run.world_size) ? report.run.world_size : report.run.num_ranks;
  const isPartial = world > report.run.num_ranks;
  const missing = list(health?.problems).find((problem) => kindOfProblem(problem) === "missing-rank");
  if (isPartial) found.push(`Every number is of ${report.run.num_ranks} of ${plural(world, "rank")}${missing ? `; ${wordsOf(missing)}` : run.page.meta.is_from_traces ? ": the others have no trace" : ": the others were not recorded"}.`);
  const dropped = num(health?.num_dropped) ?? 0;
  if (dropped > 0) found.push(`${plural(dropped, "record")} were lost.`);
  const others = list(health?.problems).filter((problem) => !isPartial || problem !== missing);
  for (const problem of others.slice(0, 3)) found.push(wordsOf(problem));
  if (report.steps.num_steps < 5) found.push(`Only ${plural(report.steps.num_steps, "step")} ${report.steps.num_steps === 1 ? "was" : "were"} analysed: numbers about steps are uncertain.`);
  return <>{found.map((text) => <p key={text} class="banner" role="note"><StateIcon state="attention" />{cleanText(text)}</p>)}</>;
}

function kindOfProblem(problem: unknown): unknown {
  return typeof problem === "object" && problem !== null ? (problem as Record<string, unknown>)["kind"] : undefined;
}

export function wordsOf(problem: unknown): string {
  if (typeof problem === "string") return problem;
  if (typeof problem === "object" && problem !== null) {
    const { text, message, reason, file, rank } = problem as Record<string, unknown>;
    const words = [text, message, reason].find((one) => typeof one === "string");
    const where = [typeof rank === "number" ? `rank ${rank}` : "", typeof file === "string" ? file : ""].filter(Boolean).join(", ");
    if (words) return `${where ? `${where}: ` : ""}${words as string}`;
  }
  return JSON.stringify(problem);
}

/** The tab of the section that is on top of the window. */
function watchScroll(): () => void {
  const follow = (): void => {
    let found = "verdict";
    for (const { section } of tabsOf()) {
      const element = document.getElementById(section);
      if (element && element.getBoundingClientRect().top < 160) found = section;
    }
    currentTab.value = found;
  };
  addEventListener("scroll", follow, { passive: true });
  follow();
  return () => removeEventListener("scroll", follow);
}
