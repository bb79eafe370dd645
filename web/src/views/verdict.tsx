// V1: one sentence, its price, how sure; and V2: five questions, always all five.
import { isKnown, reasonOf } from "../data/known";
import type { Lamp } from "../data/page";
import { StateIcon } from "../parts/icons";
import { hover } from "../parts/tip";
import { Words } from "../parts/words";
import { reveal, showEvidence } from "../state/findings";
import { go, state } from "../state/fragment";
import type { Run, ShownFinding } from "../state/run";
import { copy } from "../text/files";
import { markdownOf, markdownOfHang } from "../text/markdown";
import { clean, cleanText, nameRanks, sentence } from "../text/names";
import { sayOnset } from "../text/since";
import { duration, plural, ratio } from "../text/units";

const TONES: Readonly<Record<string, string>> = { bad: "var(--bad)", attention: "var(--warn)" };

export function Verdict({ run }: { run: Run }) {
  const { hang, verdict } = run.page;
  const finding = run.findings.find((one) => one.id === verdict.finding) ?? null;
  const edit = finding && !hang?.is_stuck ? whatIf(run, finding) : "";
  return (
    <section class="card verdict" id="verdict" aria-label="Verdict" style={{ "--sev": TONES[verdict.tone] ?? "var(--line)" }}>
      <div class="words">
        <h2>{sentence(verdict.title)}{/[.!?]$/.test(verdict.title.trim()) ? "" : "."}</h2>
        {verdict.text && <p>{cleanText(verdict.text)}</p>}
        {(hang?.is_stuck ? hang.advice : finding?.change) && <p class="todo"><b>What to do:</b> <Words text={hang?.is_stuck ? hang.advice : finding!.change} /></p>}
        {hang?.is_stuck && (
          <div class="row">
            <button type="button" class="main" onClick={() => { go({ v: "waits" }); reveal("waits"); }}>Who waits for whom</button>
            <button type="button" onClick={() => void copy(markdownOfHang(run, hang), "verdict")}>Copy as Markdown</button>
          </div>
        )}
        {finding && <p class="note">{whoAndWhen(run, finding)}</p>}
        {finding && (
          <div class="row">
            {!hang?.is_stuck && <button type="button" class="main" onClick={() => showEvidence(finding)}>Show evidence</button>}
            {!hang?.is_stuck && <button type="button" onClick={() => void copy(markdownOf(run, finding), "finding")}>Copy as Markdown</button>}
            {edit && <button type="button" onClick={() => void copy(edit, "command")} {...hover(() => <>Copies <code>{edit}</code>: how long a step would take otherwise, by replay.</>)}>What if…</button>}
            <span class="note">Severity {finding.severity}. Sure: {finding.confidence.level} ({cleanText(finding.confidence.text)})</span>
          </div>
        )}
      </div>
      {hang?.is_stuck && hang.age_ns !== null
        ? <div class="price"><strong>{duration(hang.age_ns)}</strong><span>longest wait</span></div>
        : finding && <Price finding={finding} />}
    </section>
  );
}

/** `Rank 5 (dp0.tp1.pp1), since step 15 (2026-01-05 09:30:01 UTC).` */
function whoAndWhen(run: Run, finding: ShownFinding): string {
  const { rankList } = finding;
  const place = rankList.length === 1 ? run.place(rankList[0]!) : "";
  const who = rankList.length ? `${nameRanks(rankList)}${place ? ` (${place})` : ""}` : "the whole job";
  return `${sentence(who)}, ${sayOnset(finding)}.`;
}

/** The command that replays the run without a finding's cause; empty where no edit says that. */
function whatIf(run: Run, finding: ShownFinding): string {
  const axis = finding.shown.find((link) => link.axis)?.axis;
  const pipeline = run.page.report.pipeline;
  const edits: Readonly<Record<string, string>> = {
    ST: finding.rankList.length === 1 ? `rank=${finding.rankList[0]}:ideal` : "",
    CO: axis ? `bandwidth.${axis}=2x` : "",
    IN: "phase=data:0",
    PP: isKnown(pipeline) && isKnown(pipeline.num_microbatches) ? `microbatches=${2 * pipeline.num_microbatches}` : "",
  };
  const edit = edits[finding.code.slice(0, 2)];
  return edit ? `meshscope simulate ${clean(run.page.meta.title, 60)} --edit ${edit}` : "";
}

function Price({ finding }: { finding: ShownFinding }) {
  const { saved_ns: saved, step_ns: step, saved_ratio: share, price_basis: basis } = finding;
  if (!isKnown(saved)) return <div class="price unknown"><strong>not priced</strong><span>{cleanText(reasonOf(saved))}</span></div>;
  if (saved <= 0) return <div class="price unknown"><strong>not priced</strong><span>the replay without it saves nothing</span></div>;
  return (
    <div class="price">
      <strong>−{duration(saved)}</strong>
      <span>
        {isKnown(step) ? `of ${duration(step)} a step` : "a step"}
        {isKnown(share) ? `, ${ratio(share)}` : ""}{isKnown(basis) ? ` · ${cleanText(basis)}` : ""}
      </span>
    </div>
  );
}

export function Lamps({ run }: { run: Run }) {
  return <div class="lamps" role="group" aria-label="Five questions">{run.page.lamps.map((lamp) => <LampButton key={lamp.key} lamp={lamp} />)}</div>;
}

function LampButton({ lamp }: { lamp: Lamp }) {
  const isChosen = state.value.l === lamp.key;
  const icon = lamp.state === "not known" ? "unknown" : lamp.state;
  const silent = Object.keys(lamp.not_run).length;
  const looked = `${plural(lamp.rules.length, "rule")} looked: ${lamp.rules.join(", ") || "none"}${silent ? `; ${silent} could not run` : ""}`;
  const click = (): void => {
    go({ l: isChosen ? "" : lamp.key });
    if (!isChosen && lamp.findings.length) reveal("findings");
  };
  return (
    <button type="button" class="lamp" aria-pressed={isChosen} data-lamp={lamp.key} data-state={icon} onClick={click} {...hover(() => looked)}>
      <span class="ask"><StateIcon state={icon} />{lamp.question}</span>
      <strong>{cleanText(lamp.value)}</strong>
      <span class="detail">{lamp.state === "not known" && "not known: "}{cleanText(lamp.note)}</span>
    </button>
  );
}
