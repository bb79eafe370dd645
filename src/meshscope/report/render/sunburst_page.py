"""The parts of a sunburst page that are the same for all: style and script, nothing from elsewhere.

The script only reads the JSON in the page and sets `textContent` and attributes, so a name from a
run is never taken for markup.
"""

STYLE = """
body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}
h1{font-size:18px}nav a{margin-right:12px}
#row{display:flex;flex-wrap:wrap;gap:24px;align-items:flex-start}
svg{flex:1 1 420px;max-width:680px}
path{stroke:#fff;stroke-width:.5;cursor:pointer}path:hover{opacity:.75}
#where{min-height:3em;font-weight:600;overflow-wrap:anywhere}
table{border-collapse:collapse;margin-bottom:24px}td.c{width:12px;padding:0}
td.c+td{padding-left:8px}
tbody#rows td{border-bottom:3px solid transparent;background-clip:padding-box}
tbody#rows tr{cursor:pointer}td,th{padding:2px 12px 2px 0;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}a{color:#8bf}}
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const RINGS = 6, SIZE = 720, MID = SIZE / 2;
const svg = document.getElementById("chart"), where = document.getElementById("where");
const rows = document.getElementById("rows");
function show(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0, value = bytes;
  while (value >= 1000 && i < units.length - 1) { value /= 1024; i += 1; }
  return (i ? value.toFixed(2) : value) + " " + units[i] + " (" + bytes + " bytes)";
}
function total(node) {
  if (node.total === undefined) {
    node.total = (node.bytes || 0) + (node.children || []).reduce((s, c) => s + total(c), 0);
  }
  return node.total;
}
function hue(text) {
  let h = 7;
  for (const c of text) { h = (h * 31 + c.codePointAt(0)) % 360; }
  return h;
}
function point(angle, radius) {
  return (MID + radius * Math.sin(angle)).toFixed(3) + " " +
    (MID - radius * Math.cos(angle)).toFixed(3);
}
function arc(from, to, inner, outer) {
  const end = Math.min(to, from + 2 * Math.PI - 1e-4), large = end - from > Math.PI ? 1 : 0;
  return "M" + point(from, outer) + "A" + outer + " " + outer + " 0 " + large + " 1 " +
    point(end, outer) + "L" + point(end, inner) + "A" + inner + " " + inner + " 0 " + large +
    " 0 " + point(from, inner) + "Z";
}
function colour(path, depth) {
  return "hsl(" + hue(path) + " 55% " + (42 + 6 * depth) + "%)";
}
function draw(node, path, from, to, depth, root) {
  if (depth > RINGS || to - from < 1e-4) { return; }
  const width = (MID - 4) / (RINGS + 1);
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("d", arc(from, to, depth * width, (depth + 1) * width));
  shape.setAttribute("fill", depth ? colour(path, depth) : "#888");
  const label = (path || "all") + ": " + show(total(node));
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = label;
  shape.appendChild(title);
  shape.addEventListener("mouseenter", () => { where.textContent = label; });
  shape.addEventListener("click", () => render(node === root ? data.tree : node, path));
  svg.appendChild(shape);
  let at = from;
  for (const child of node.children || []) {
    const share = total(node) ? (to - from) * total(child) / total(node) : 0;
    draw(child, path ? path + "." + child.name : child.name, at, at + share, depth + 1, root);
    at += share;
  }
}
function render(node, path) {
  svg.replaceChildren();
  rows.replaceChildren();
  const isRoot = node === data.tree;
  draw(node, isRoot ? "" : path, 0, 2 * Math.PI, 0, node);
  where.textContent = (isRoot ? "all" : path) + ": " + show(total(node));
  const children = [...(node.children || [])].sort((a, b) => total(b) - total(a));
  for (const child of children.slice(0, 40)) {
    const row = rows.insertRow(), swatch = row.insertCell();
    const name = row.insertCell(), share = row.insertCell(), size = row.insertCell();
    const below = isRoot ? child.name : path + "." + child.name;
    swatch.className = "c";
    swatch.style.backgroundColor = colour(below, 1);
    name.textContent = child.name.replaceAll("_", " ");
    share.className = size.className = "n";
    share.textContent = (100 * total(child) / (total(node) || 1)).toFixed(1) + " %";
    size.textContent = show(total(child));
    row.addEventListener("click", () => render(child, below));
  }
}
render(data.tree, "");
"""
