// Modules at the peak: an icicle, or a sunburst.
import { useSignal } from "@preact/signals";
import { hierarchy, partition } from "d3-hierarchy";
import type { HierarchyRectangularNode } from "d3-hierarchy";
import type { RankMemory } from "../data/memory";
import { MEMORY_CATEGORIES, memoryColour } from "../draw/kinds";
import { Facts, hover } from "../parts/tip";
import { clean } from "../text/names";
import { memory as size, ratio } from "../text/units";

interface Node {
  readonly name: string;
  readonly path: string;
  own: number;
  categories: Record<string, number>;
  children: Node[];
}

const MAX_MODULES = 600;
const HEIGHT = 190;
const WIDTH = 560;
const MAX_DEPTH = 7;

function grow(one: RankMemory): Node {
  const root: Node = { name: "model", path: "", own: 0, categories: {}, children: [] };
  for (const module of one.modules.slice(0, MAX_MODULES)) {
    let at = root;
    const parts = module.path ? module.path.split(".").slice(0, MAX_DEPTH) : [];
    parts.forEach((name, i) => {
      const path = parts.slice(0, i + 1).join(".");
      let next = at.children.find((child) => child.path === path);
      if (!next) at.children.push((next = { name, path, own: 0, categories: {}, children: [] }));
      at = next;
    });
    at.own += Math.max(0, module.total_bytes);
    for (const [category, bytes] of Object.entries(module.categories_bytes)) at.categories[category] = (at.categories[category] ?? 0) + bytes;
  }
  return root;
}

export function ModuleMap({ one, isRound }: { one: RankMemory; isRound: boolean }) {
  const focus = useSignal("");
  if (!one.modules.length) return <p class="dim">no module holds memory at the peak of rank {one.rank}</p>;
  const whole = hierarchy(grow(one)).sum((node) => node.own).sort((a, b) => (b.value ?? 0) - (a.value ?? 0));
  const found = whole.find((node) => node.data.path === focus.value) ?? whole;
  const root = hierarchy(found.data).sum((node) => node.own).sort((a, b) => (b.value ?? 0) - (a.value ?? 0));
  const total = root.value || 1;
  const nodes = isRound
    ? partition<Node>().size([2 * Math.PI, HEIGHT / 2])(root).descendants()
    : partition<Node>().size([WIDTH, HEIGHT])(root).descendants();
  const colour = (node: HierarchyRectangularNode<Node>): string => {
    const sums = new Map<string, number>();
    node.each((child) => { for (const [name, bytes] of Object.entries(child.data.categories)) sums.set(name, (sums.get(name) ?? 0) + bytes); });
    const main = [...sums].sort((a, b) => b[1] - a[1] || MEMORY_CATEGORIES.indexOf(a[0]) - MEMORY_CATEGORIES.indexOf(b[0]))[0]?.[0] ?? "other";
    return `var(--${memoryColour(main)})`;
  };
  const facts = (node: HierarchyRectangularNode<Node>) => {
    const rows = Object.entries(node.data.categories).sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, bytes]) => [clean(name.replaceAll("_", " "), 30), size(bytes)] as [string, string]);
    return <Facts title={`${clean(node.data.path || "model", 80)}: ${size(node.value ?? 0)}, ${ratio((node.value ?? 0) / total)}`} rows={rows} />;
  };
  const pick = (node: HierarchyRectangularNode<Node>): void => { focus.value = node.data.path === focus.value ? parentOf(node.data.path) : node.data.path; };
  const label = `Modules of rank ${one.rank} at its peak: ${root.children?.slice(0, 5).map((node) => `${node.data.name} ${size(node.value ?? 0)}`).join(", ") ?? ""}`;
  return (
    <>
      <p class="note">Rank {one.rank} at its peak, by module; colour: what most of it is. {focus.value ? <button type="button" class="plain" onClick={() => (focus.value = "")}>{clean(focus.value, 50)} ×</button> : "Click a module to go into it."}</p>
      {isRound ? (
        <svg viewBox={`0 0 ${HEIGHT} ${HEIGHT}`} width="100%" height={HEIGHT} role="img" aria-label={label}>
          <g transform={`translate(${HEIGHT / 2},${HEIGHT / 2})`}>
            {nodes.filter((node) => node.depth > 0 && node.x1 - node.x0 > 0.004).map((node) => <path key={node.data.path} d={ring(node)} fill={colour(node)} stroke="var(--card)" stroke-width="0.5" onClick={() => pick(node)} {...hover(() => facts(node))} />)}
            <text text-anchor="middle" dy="4" font-size="11" fill="var(--ink)">{size(total)}</text>
          </g>
        </svg>
      ) : (
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} width="100%" height={HEIGHT} preserveAspectRatio="none" role="img" aria-label={label}>
          {nodes.filter((node) => node.x1 - node.x0 > 0.7).map((node) => (
            <rect key={node.data.path} x={node.x0} y={node.y0} width={Math.max(0.5, node.x1 - node.x0 - 1)} height={Math.max(1, node.y1 - node.y0 - 1)} fill={node.depth ? colour(node) : "var(--sunk)"} onClick={() => pick(node)} {...hover(() => facts(node))} />
          ))}
        </svg>
      )}
      {!isRound && <p class="note">{root.children?.slice(0, 4).map((node) => `${clean(node.data.name, 24)} ${size(node.value ?? 0)}`).join(" · ")}</p>}
    </>
  );
}

/** A part of a ring, clockwise from the top: x is its angle, y its radius. */
function ring({ x0, x1, y0, y1 }: HierarchyRectangularNode<Node>): string {
  const end = Math.min(x1, x0 + 6.28);
  const at = (angle: number, radius: number): string => `${radius * Math.sin(angle)} ${-radius * Math.cos(angle)}`;
  const turn = end - x0 > Math.PI ? 1 : 0;
  const outer = y1 - 1;
  return `M${at(x0, y0)}L${at(x0, outer)}A${outer} ${outer} 0 ${turn} 1 ${at(end, outer)}L${at(end, y0)}A${y0} ${y0} 0 ${turn} 0 ${at(x0, y0)}`;
}

function parentOf(path: string): string {
  return path.split(".").slice(0, -1).join(".");
}
