// The frame of every view: a title that says its scope, tools, the picture or its table, and the line
// that says what the number is not.
import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { runLabel } from "../state/run";
import { scopeText } from "../state/scope";
import type { Table } from "../text/files";
import { makeCsv, makeJson, save } from "../text/files";
import { savePicture } from "../text/picture";
import { DataTable } from "./data_table";
import { Menu } from "./menu";

export interface CardProps {
  /** Of the view: the anchor that links, tabs and findings lead to. */
  readonly id: string;
  readonly title: string;
  readonly sub?: ComponentChildren;
  readonly tools?: ComponentChildren;
  /** What the number of the view is not. */
  readonly not?: ComponentChildren;
  readonly table?: () => Table;
  /** Columns of twelve at 1280 and from 1600 px on. */
  readonly span?: readonly [number, number];
  readonly isScoped?: boolean;
  readonly children: ComponentChildren;
}

export function Card({ id, title, sub, tools, not, table, span = [12, 12], isScoped = false, children }: CardProps) {
  const element = useRef<HTMLElement>(null);
  const isTable = useSignal(false);
  const scope = isScoped ? scopeText.value : "";
  const caption = `${runLabel.value} · ${title}${scope ? ` · ${scope}` : ""}`;
  const name = `${runLabel.value}_${id}`;
  return (
    <section ref={element} class="card" id={id} aria-labelledby={`${id}-title`} style={{ "--c": span[0], "--w": span[1] }}>
      <header>
        <h2 id={`${id}-title`}>{title}</h2>
        <span class="sub">{sub}{scope && <span class="scope">{sub ? "; " : ""}{scope}</span>}</span>
        <div class="tools">
          {tools}
          {table && (
            <Menu label={`${title}: table and files`} text="⋯" items={[
              [isTable.value ? "As picture" : "As table", () => (isTable.value = !isTable.value)],
              ["PNG", () => void savePicture(element.current!, caption, name)],
              ["CSV", () => save(`${name}.csv`, makeCsv(table(), caption), "text/csv")],
              ["JSON", () => save(`${name}.json`, makeJson(table(), caption), "application/json")],
            ]} />
          )}
        </div>
      </header>
      <div class="body">{isTable.value && table ? <DataTable table={table()} label={title} /> : children}</div>
      {not && <p class="not"><b>Not:</b> {not}</p>}
    </section>
  );
}
