// A picture of a view: its elements, laid out again inside an SVG image, at twice the size. Title,
// run, scope and the "Not:" line are part of the card, so they are in the picture.
import { notify, save } from "./files";

const SCALE = 2;

export async function savePicture(card: HTMLElement, caption: string, name: string): Promise<void> {
  try {
    const blob = await renderPicture(card, caption);
    save(`${name}.png`, blob);
  } catch {
    notify("the browser did not give a picture; a screenshot shows the same");
  }
}

export async function renderPicture(card: HTMLElement, caption: string): Promise<Blob> {
  const { width, height } = card.getBoundingClientRect();
  const copy = card.cloneNode(true) as HTMLElement;
  copyCanvases(card, copy);
  for (const gone of copy.querySelectorAll(".tools, .sr, .over, .outline")) gone.remove();
  for (const old of copy.querySelectorAll("select")) old.remove();
  copy.style.width = `${width}px`;
  copy.style.border = "0";
  const foot = document.createElement("p");
  foot.className = "note";
  foot.textContent = caption;
  copy.append(foot);
  const frame = document.createElement("div");
  frame.className = "grid";
  frame.style.display = "block";
  frame.append(copy);
  const h = Math.ceil(height) + 28;
  const source = wrapSvg(frame, Math.ceil(width), h);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(width) * SCALE;
  canvas.height = h * SCALE;
  const ctx = canvas.getContext("2d")!;
  ctx.fillStyle = getComputedStyle(card).backgroundColor;
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture")))));
}

function copyCanvases(from: HTMLElement, to: HTMLElement): void {
  const targets = to.querySelectorAll("canvas");
  from.querySelectorAll("canvas").forEach((canvas, i) => {
    const target = targets[i];
    if (!target || canvas.width === 0) return;
    const image = document.createElement("img");
    image.src = canvas.toDataURL();
    const style = getComputedStyle(canvas);
    image.style.cssText = `position:${style.position};inset:${style.inset};width:${canvas.clientWidth}px;height:${canvas.clientHeight}px`;
    if (canvas.classList.contains("over")) image.className = "over";
    target.replaceWith(image);
  });
}

function wrapSvg(content: HTMLElement, width: number, height: number): string {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText));
  const root = document.createElement("div");
  root.dataset["theme"] = document.documentElement.dataset["theme"] ?? "light";
  root.className = "picture";
  const style = document.createElement("style");
  // In the image there is no document element: the tokens of :root are given to its outermost box.
  style.textContent = rules.join("\n")
    .replaceAll(/:root\[data-theme="dark"\]/g, '.picture[data-theme="dark"]')
    .replaceAll(":root", ".picture")
    .replaceAll(/\bbody\b/g, ".picture");
  root.append(style, content);
  const text = new XMLSerializer().serializeToString(root);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width * SCALE}" height="${height * SCALE}" viewBox="0 0 ${width} ${height}">`
    + `<foreignObject width="100%" height="100%">${text}</foreignObject></svg>`;
}
