// V15: who waits for whom in a stuck job. The root waits for nobody; dashed is not certain.
import { stratify, tree } from "d3-hierarchy";
import type { HierarchyPointNode } from "d3-hierarchy";
import type { Hang, StackFrame } from "../data/hang";
import type { WaitingRank } from "../data/page";
import { Card } from "../parts/card";
import { Facts, hover } from "../parts/tip";
import type { Run } from "../state/run";
import { chosenRanks, selectRanks } from "../state/scope";
import { clean, cleanText, nameRanks, ranges } from "../text/names";
import { duration, plural } from "../text/units";

const MAX_NODES = 60;
const [BOX_WIDTH, BOX_HEIGHT, COLUMN, LINE] = [168, 40, 216, 50];

interface Node {
  readonly id: string;
  readonly parent: string;
  readonly ranks: readonly number[];
  readonly title: string;
  readonly text: string;
  readonly isCertain: boolean;
  readonly isRoot: boolean;
  readonly waits: readonly WaitingRank[];
}

const TOP = "top";

export function WaitsView({ run, hang }: { run: Run; hang: Hang & { readonly tree: readonly WaitingRank[] } }) {
  const nodes = foldTree(run, hang.tree);
  const culprit = hang.culprits[0];
  return (
    <>
      <Card id="waits" title="Who waits for whom" span={culprit ? [7, 7] : [12, 12]} sub="arrows point to the rank waited for; the root waits for nobody; dashed: not certain"
        not="a cause by itself: it says who to look at, the stack says why"
        table={() => ({ columns: ["rank", "place", "waits_for", "operation", "waited_ns", "certain"], rows: hang.tree.map((one) => [one.rank, one.label, one.waits_for.join(" "), one.operation, one.waited_ns, one.is_certain ? "yes" : "no"]) })}>
        {nodes.length ? <Tree nodes={nodes} /> : <p class="dim">no rank is known to wait for another</p>}
        {hang.notes.map((note) => <p key={note} class="note">{cleanText(note)}</p>)}
      </Card>
      {culprit && (
        <Card id="culprit" title={nameRanks(hang.culprits.map((one) => one.rank)).replace(/^r/, "R")} span={[5, 5]} sub="what is known about it">
          {hang.culprits.slice(0, 8).map((one) => (
            <div key={one.rank} class="body">
              {hang.culprits.length > 1 && <b>rank {one.rank}: {clean(one.reason.replaceAll("_", " "), 40)}</b>}
              <ul class="bullets">{one.evidence.filter((text) => !one.stack.length || !text.startsWith("stack:")).map((text) => <li key={text}>{cleanText(text)}</li>)}</ul>
              {one.stack.length > 0 ? <Stack frames={one.stack} label={`Stack of rank ${one.rank}`} /> : <p class="note">Its stack, which says what it does instead, was not read: the process did not answer, or nobody asked. While it lives <code>meshscope hang RUN --html page.html</code> asks.</p>}
            </div>
          ))}
          {hang.waiting_stack && <details><summary>stack of rank {hang.waiting_stack.rank}, which waits</summary><Stack frames={hang.waiting_stack.frames} label={`Stack of rank ${hang.waiting_stack.rank}`} /></details>}
        </Card>
      )}
    </>
  );
}

const SHOWN_FRAMES = 12;

function Stack({ frames, label }: { frames: readonly StackFrame[]; label: string }) {
  return (
    <pre class="stack" tabIndex={0} aria-label={label}>
      {frames.slice(0, SHOWN_FRAMES).map((frame, i) => <div key={i}>{cleanText(frame.file.split("/").pop() ?? "")}:{frame.line ?? "?"} <b>{cleanText(frame.function)}</b></div>)}
      {frames.length > SHOWN_FRAMES && <div class="dim">{plural(frames.length - SHOWN_FRAMES, "more frame")}</div>}
    </pre>
  );
}

/** Above 60 nodes, ranks that wait for the same rank along one axis become one node. */
function foldTree(run: Run, waits: readonly WaitingRank[]): readonly Node[] {
  const one = (wait: WaitingRank): Node => ({
    id: `${wait.rank}`, parent: wait.parent === null ? TOP : `${wait.parent}`, ranks: [wait.rank], title: `rank ${wait.rank} ${clean(wait.label, 24)}`,
    text: wait.waited_ns === null ? (wait.is_culprit ? "waits for nobody" : "does not wait") : `${clean(wait.operation.replace(/ of the (\S+) group.*/, " $1"), 40)}, ${duration(wait.waited_ns)}`,
    isCertain: wait.is_certain, isRoot: wait.is_culprit, waits: [wait],
  });
  if (waits.length <= MAX_NODES) return waits.map(one);
  const inner = new Set(waits.map((wait) => wait.parent));
  const folded = new Map<string, WaitingRank[]>();
  const kept: WaitingRank[] = [];
  for (const wait of waits) {
    if (wait.parent === null || (inner.has(wait.rank) && kept.length < MAX_NODES / 2)) kept.push(wait);
    else {
      const at = run.coordinates(wait.rank);
      const group = at && run.axes.includes("dp") ? `dp${at["dp"]}` : run.host(wait.rank) || "others";
      const key = `${nearest(wait, kept)} ${group}`;
      folded.set(key, [...(folded.get(key) ?? []), wait]);
    }
  }
  const groups = [...folded].map(([key, own]): Node => {
    const [parent, group] = key.split(" ");
    const longest = own.reduce((a, b) => ((b.waited_ns ?? 0) > (a.waited_ns ?? 0) ? b : a));
    return { id: `g ${key}`, parent: parent ?? TOP, ranks: own.map((wait) => wait.rank), title: `${plural(own.length, "rank")} of ${group}`, text: longest.waited_ns === null ? "" : `up to ${duration(longest.waited_ns)}`, isCertain: own.every((wait) => wait.is_certain), isRoot: false, waits: own };
  });
  return [...kept.map(one), ...groups];
}

function nearest(wait: WaitingRank, kept: readonly WaitingRank[]): string {
  if (wait.parent !== null && kept.some((one) => one.rank === wait.parent)) return `${wait.parent}`;
  return kept[0] ? `${kept[0].rank}` : TOP;
}

function Tree({ nodes }: { nodes: readonly Node[] }) {
  const ids = new Set(nodes.map((node) => node.id));
  const root = stratify<Node>().id((node) => node.id).parentId((node) => (node.id === TOP ? undefined : ids.has(node.parent) ? node.parent : TOP))(
    [{ id: TOP, parent: "", ranks: [], title: "", text: "", isCertain: true, isRoot: false, waits: [] }, ...nodes]);
  const laid = tree<Node>().nodeSize([LINE, COLUMN])(root);
  const all = laid.descendants().filter((node) => node.depth > 0);
  const [low, high] = [Math.min(...all.map((node) => node.x)), Math.max(...all.map((node) => node.x))];
  const deepest = Math.max(...all.map((node) => node.depth));
  const [width, height] = [(deepest - 1) * COLUMN + BOX_WIDTH + 8, high - low + BOX_HEIGHT + 8];
  const at = (node: HierarchyPointNode<Node>): readonly [number, number] => [(node.depth - 1) * COLUMN + 4, node.x - low + 4];
  return (
    <div class="scroll" style={{ maxHeight: "560px" }} tabIndex={0} role="region" aria-label="Tree of waiting ranks">
      <svg style={{ width: `min(100%, ${width}px)`, minWidth: `${Math.round(0.72 * width)}px`, height: "auto", display: "block" }} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={`${plural(all.length, "node")}; at the root ${all.filter((node) => node.depth === 1).map((node) => node.data.title).join(", ")}`}>
        <defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4 0 8z" fill="var(--wait)" /></marker></defs>
        {all.filter((node) => node.depth > 1).map((node) => {
          const [x, y] = at(node);
          const [px, py] = at(node.parent!);
          const [from, to] = [y + BOX_HEIGHT / 2, py + BOX_HEIGHT / 2];
          const middle = (x + px + BOX_WIDTH + 2) / 2;
          return <path key={node.id} d={`M${x} ${from}C${middle} ${from} ${middle} ${to} ${px + BOX_WIDTH + 2} ${to}`} fill="none" stroke="var(--wait)" stroke-width="1.5" stroke-dasharray={node.data.isCertain ? undefined : "4 3"} marker-end="url(#to)" />;
        })}
        {all.map((node) => {
          const [x, y] = at(node);
          const { data } = node;
          const isChosen = data.ranks.some((rank) => chosenRanks.value.has(rank));
          return (
            <g key={node.id} transform={`translate(${x},${y})`} style={{ cursor: "pointer" }} onClick={(event) => selectRanks(data.ranks, event.shiftKey)} {...hover(() => <NodeTip node={data} />)}>
              <rect width={BOX_WIDTH} height={BOX_HEIGHT} rx="6" fill="var(--card)" stroke={data.isRoot ? "var(--bad)" : isChosen ? "var(--ink)" : "var(--ink3)"} stroke-width={data.isRoot || isChosen ? 2 : 1} />
              <text x="9" y="16" font-size="11.5" font-weight="640" fill="var(--ink)">{cut(data.title, 24)}</text>
              <text x="9" y="31" font-size="11" fill="var(--ink2)">{cut(data.text, 26)}</text>
            </g>
          );
        })}
      </svg>
    </div>
  );
}

function cut(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

function NodeTip({ node }: { node: Node }) {
  const wait = node.waits[0];
  if (!wait) return null;
  if (node.waits.length > 1) return <Facts title={node.title} rows={[["ranks", ranges(node.ranks)]]} />;
  const rows: [string, string][] = [];
  if (wait.host) rows.push(["host", clean(wait.host, 40)]);
  if (wait.operation) rows.push(["in", clean(wait.operation, 80)]);
  if (wait.waited_ns !== null) rows.push(["waits since", duration(wait.waited_ns)]);
  if (wait.waits_for.length) rows.push(["for", nameRanks(wait.waits_for)]);
  if (!wait.is_certain) rows.push(["certain", "no: it holds a handle it may not wait for"]);
  return <Facts title={node.title} rows={rows} />;
}
