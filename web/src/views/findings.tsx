// What to change: every finding with its price, its evidence and where to see it.
import { isKnown, reasonOf } from "../data/known";
import type { Link } from "../data/page";
import { Card } from "../parts/card";
import { Severity, severityRank } from "../parts/icons";
import { Words } from "../parts/words";
import { chosenFinding, reveal, showEvidence } from "../state/findings";
import { go, state } from "../state/fragment";
import type { Run, ShownFinding } from "../state/run";
import type { Table } from "../text/files";
import { copy } from "../text/files";
import { markdownOf } from "../text/markdown";
import { cleanText, nameRanks, sentence } from "../text/names";
import { sayOnset } from "../text/since";
import { duration, ratio, withUnit } from "../text/units";

const VIEW_WORDS: Readonly<Record<string, string>> = {
  heat: "heat map", budget: "budget", timeline: "timeline", pipeline: "bubble", communication: "communication",
  bandwidth: "bandwidth", pairs: "pairs", memory: "memory", training: "training", trust: "trust",
};

export function Findings({ run, span }: { run: Run; span: readonly [number, number] }) {
  const lamp = state.value.l;
  const shown = run.findings.filter((one) => !lamp || one.lamp === lamp);
  const roots = shown.filter((one) => !one.cause || !shown.some((other) => other.id === one.cause));
  const largest = Math.max(1, ...run.findings.map((one) => (isKnown(one.saved_ns) ? one.saved_ns : 0)));
  const diagnosis = run.page.report.diagnosis;
  const error = isKnown(diagnosis) ? diagnosis.replay_error_ratio : null;
  const { hang, verdict } = run.page;
  const isHang = Boolean(hang?.is_stuck) && (!lamp || lamp === "move");
  const sub = isKnown(error) ? `priced by replay, ${ratio(error)} off the clock` : "";
  return (
    <Card id="findings" title="What to change" sub={sub} span={span} table={() => tableOf(shown)}
      not="a sum. Two findings may wait for the same thing. Low = true, but normal for this set-up or small."
      tools={lamp ? <button type="button" class="pill" onClick={() => go({ l: "" })}>only “{lamp}” ×</button> : null}>
      {isHang && (
        <article class="finding chosen" id="finding-hang">
          <Severity word="critical" />
          <div class="middle">
            <h3>{sentence(verdict.title)}</h3>
            <p>{cleanText(hang!.advice)}</p>
            <div class="links"><button type="button" onClick={() => { go({ v: "waits" }); reveal("waits"); }}>who waits for whom ▸</button></div>
          </div>
          <div class="cost"><span class="dim">the job makes no more steps</span></div>
        </article>
      )}
      {isHang && roots.length > 0 && <p class="note">What else was found:</p>}
      {roots.length === 0
        ? isHang ? null : <p class="dim">{isKnown(diagnosis) ? (lamp ? "No finding answers this question." : "No rule found anything.") : cleanText(reasonOf(diagnosis, "the diagnosis did not run"))}</p>
        : <div class="findings">{roots.map((one) => <FindingCard key={one.id} run={run} one={one} all={shown} largest={largest} />)}</div>}
    </Card>
  );
}

function FindingCard({ run, one, all, largest }: { run: Run; one: ShownFinding; all: readonly ShownFinding[]; largest: number }) {
  const children = all.filter((other) => other.cause === one.id && other.id !== one.id);
  const isChosen = chosenFinding.value?.id === one.id && (!run.page.hang?.is_stuck || state.value.f === one.id);
  const isOpen = isChosen || severityRank(one.severity) > 1;
  const saved = isKnown(one.saved_ns) && one.saved_ns > 0 ? one.saved_ns : null;
  const chips = one.evidence.filter((evidence) => typeof evidence.value === "number" && evidence.unit).slice(0, 3);
  return (
    <article class={`finding ${isChosen ? "chosen" : ""}`} id={`finding-${one.id}`} data-finding={one.id}>
      <Severity word={one.severity} />
      <div class="middle">
        <h3>{sentence(one.title)}</h3>
        {isOpen && <p><Words text={one.change} /></p>}
        {isOpen && chips.length > 0 && (
          <p class="note">{chips.map((evidence, i) => <span key={i}>{i > 0 && " · "}{cleanText(evidence.name)} <b>{withUnit(evidence.value, evidence.unit)}</b></span>)}</p>
        )}
        {isOpen && <p class="note">{sentence(one.rankList.length ? nameRanks(one.rankList) : "all ranks")}, {sayOnset(one)}.</p>}
        <div class="links">
          <code class="dim">{one.code}</code>
          {one.shown.slice(0, 3).map((link, i) => (
            <button key={i} type="button" onClick={() => showEvidence(one, link)}>{wordsOf(link)} ▸</button>
          ))}
          {isOpen && <button type="button" class="plain" onClick={() => void copy(markdownOf(run, one), "finding")}>copy</button>}
        </div>
        {children.length > 0 && (
          <details>
            <summary>explains {children.length} more</summary>
            <div class="children">{children.map((child) => <FindingCard key={child.id} run={run} one={child} all={all} largest={largest} />)}</div>
          </details>
        )}
      </div>
      <div class="cost">
        {saved === null
          ? <span class="dim" title={cleanText(reasonOf(one.saved_ns, "the replay without it saves nothing"))}>not priced</span>
          : <span><strong>−{duration(saved)}</strong> {isKnown(one.saved_ratio) && <span class="dim">{ratio(one.saved_ratio)}</span>}</span>}
        {saved !== null && <div class={`meter ${severityRank(one.severity) > 1 ? "hot" : ""}`}><div style={{ width: `${(100 * saved) / largest}%` }} /></div>}
      </div>
    </article>
  );
}

function wordsOf(link: Link): string {
  if (link.view === "timeline" && link.step !== null) return `step ${link.step}`;
  return VIEW_WORDS[link.view] ?? cleanText(link.view);
}

function tableOf(findings: readonly ShownFinding[]): Table {
  return {
    columns: ["code", "severity", "title", "saved_ns", "saved_ratio", "ranks", "first_step", "last_step", "onset_step", "course", "sure", "change", "explained_by"],
    rows: findings.map((one) => [
      one.code, one.severity, one.title, isKnown(one.saved_ns) ? one.saved_ns : null, isKnown(one.saved_ratio) ? one.saved_ratio : null,
      one.rankList.join(" "), one.first_step, one.last_step,
      isKnown(one.onset) ? one.onset.step : null, isKnown(one.onset) ? one.onset.course : null, one.confidence.level, one.change, one.explained_by,
    ]),
  };
}
