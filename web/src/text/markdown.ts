// A finding as text that a person sends: names escaped, no command line, no environment.
import type { Hang } from "../data/hang";
import { isKnown, reasonOf } from "../data/known";
import type { Run, ShownFinding } from "../state/run";
import { cleanText, nameRanks, sentence } from "./names";
import { sayOnset } from "./since";
import { duration, moment, ratio, withUnit } from "./units";

function escape(text: unknown): string {
  return cleanText(text).replaceAll(/([\\`*_{}[\]<>()#+!|~&-])/g, "\\$1");
}

function factsOf(run: Run): string {
  const { report, meta } = run.page;
  const layout = isKnown(report.layout) ? report.layout.text : "layout not known";
  const started = isKnown(report.run.started_unix_ns) ? `, ${moment(report.run.started_unix_ns)}` : "";
  return `${escape(meta.title)}: ${report.run.num_ranks} ranks, ${escape(layout)}, ${report.steps.num_steps} steps${started}, meshscope ${escape(report.meshscope_version)}`;
}

export function markdownOf(run: Run, finding: ShownFinding): string {
  const where = `${finding.rankList.length ? nameRanks(finding.rankList) : "all ranks"}, ${sayOnset(finding)}`;
  const saves = isKnown(finding.saved_ns)
    ? `${duration(finding.saved_ns)} a step${isKnown(finding.saved_ratio) ? ` (${ratio(finding.saved_ratio)})` : ""}, ${escape(isKnown(finding.price_basis) ? finding.price_basis : "")}`
    : `not priced: ${escape(reasonOf(finding.saved_ns))}`;
  return [
    `### ${escape(sentence(finding.title))} (${escape(finding.code)}, ${escape(finding.severity)})`, "",
    escape(finding.summary), "",
    `- **Saves:** ${saves}`,
    `- **Where:** ${where}`,
    `- **Sure:** ${escape(finding.confidence.level)}: ${escape(finding.confidence.text)}`,
    `- **Change:** ${escape(finding.change)}`, "",
    "| evidence | value |", "|---|---|",
    ...finding.evidence.map((one) => `| ${escape(one.name)} | ${escape(withUnit(one.value, one.unit))} |`), "",
    factsOf(run), "", linkText(),
  ].join("\n");
}

export function markdownOfHang(run: Run, hang: Hang): string {
  return [
    `### ${escape(sentence(hang.sentence))}`, "",
    ...hang.culprits.flatMap((one) => [
      `**rank ${one.rank}** (${escape(one.reason.replaceAll("_", " "))})`,
      ...one.evidence.map((text) => `- ${escape(text)}`), "",
      ...(one.stack.length ? ["```", ...one.stack.slice(0, 20).map((frame) => cleanText(`${frame.file}:${frame.line ?? "?"} in ${frame.function}`)), "```", ""] : []),
    ]),
    factsOf(run), "", linkText(),
  ].join("\n");
}

/** The address that leads back here; of a file only its name, which is all that others share. */
export function linkText(): string {
  if (location.protocol !== "file:") return location.href;
  return `${decodeURIComponent(location.pathname.split("/").pop() ?? "")}${location.hash}`;
}
