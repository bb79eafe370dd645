// What the header says of a run that is still recorded, and of the connection to it.
import { StateIcon } from "../parts/icons";
import { changedFindings, clock, live, showWaiting, sortFindings, waitingSteps } from "../state/live";
import { clean } from "../text/names";
import { plural } from "../text/units";

function ago(since: number): string {
  const seconds = Math.max(0, (clock.value - since) / 1000);
  return seconds < 10 ? `${seconds.toFixed(1)} s ago` : seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

export function StatePill({ state, text }: { state: string; text: string }) {
  const status = live.value;
  if (status && status.lostAt !== null) return <span class="pill bad" role="status"><StateIcon size={12} state="unknown" />connection lost {ago(status.lostAt)}</span>;
  if (!status || status.isOver) return <Pill kind={state} text={clean(text, 60).toLowerCase()} />;
  if (status.state === "live") {
    const step = status.step === null ? "no step yet" : `step ${status.step}`;
    return <span class="pill live"><span class="dot" aria-hidden="true" />live, {step}, read {ago(status.readAt)}</span>;
  }
  return <Pill kind={status.state} text={`${clean(status.text, 60).toLowerCase()}${status.step === null ? "" : `, step ${status.step}`}`} />;
}

function Pill({ kind, text }: { kind: string; text: string }) {
  const isBad = kind === "failed" || kind === "stuck";
  return <span class={`pill ${isBad ? "bad" : ""}`}><StateIcon size={12} state={isBad ? "bad" : kind === "finished" ? "ok" : "unknown"} />{text}</span>;
}

/** What arrived and waits for the reader. */
export function News() {
  return (
    <>
      {waitingSteps.value > 0 && <button type="button" onClick={showWaiting}>▸ {plural(waitingSteps.value, "new step")}</button>}
      {changedFindings.value > 0 && <button type="button" onClick={sortFindings}>{changedFindings.value} changed</button>}
    </>
  );
}
