// `meshscope serve`: the same data by fetch, and what is new by one event stream.
import type { Known } from "./known";
import type { Matrix, PackedMatrix } from "./matrix";
import { makeMatrix, unpackMatrix } from "./matrix";
import type { PageDocument } from "./page";
import type { StepSpans } from "./report";
import type { LiveEvent, Source } from "./source";

const EVENTS = ["hello", "status", "steps", "series", "report", "hang", "finding", "end", "reset"] as const;
const LOST_AFTER_MS = 5000;
const AGAIN_MS = 2000;
const HIDDEN_MS = 30_000;

function readMeta(name: string): string | null {
  return document.querySelector<HTMLMetaElement>(`meta[name="meshscope-${name}"]`)?.content ?? null;
}

/** Leads to the root of the server, wherever a proxy put it; null: this page is a file. */
export const base = typeof document === "undefined" ? null : readMeta("base");
export const servedRun = typeof document === "undefined" ? null : readMeta("run");

export function address(path: string): string {
  return `${base ?? "./"}${path}`;
}

async function fetchGood(path: string, accept: string): Promise<Response> {
  const answer = await fetch(address(path), { credentials: "same-origin", cache: "no-cache", headers: { accept } });
  if (!answer.ok) {
    const said = (await answer.json().catch(() => null)) as { error?: string } | null;
    throw new Error(said?.error ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

export async function getJson<T>(path: string): Promise<T> {
  return (await (await fetchGood(path, "application/json")).json()) as T;
}

/** A request that may fail: the reason is shown where the value would be. */
async function ask<T>(make: () => Promise<Known<T>>): Promise<Known<T>> {
  try {
    return await make();
  } catch (error) {
    return { unavailable: error instanceof Error ? error.message : String(error) };
  }
}

type Head = Omit<PackedMatrix, "largest_layer" | "mean_layer"> & { readonly layers: readonly string[]; readonly shape: readonly [number, number] };

async function getMatrix(path: string): Promise<Known<Matrix>> {
  const answer = await fetchGood(path, "application/octet-stream, application/json");
  if (answer.headers.get("content-type")?.startsWith("application/json")) return (await answer.json()) as Known<Matrix>;
  const data = await answer.arrayBuffer();
  const length = new DataView(data).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Head;
  const size = head.shape[0] * head.shape[1];
  const layers = head.layers.map((_, i) => new Uint16Array(data, 4 + length + 2 * size * i, size));
  return makeMatrix(head, layers[0]!, layers[1] ?? layers[0]!);
}

export class HttpSource implements Source {
  readonly isLive = true;
  private readonly path: string;
  private page: PageDocument | null = null;

  /** `run` is the id of a run, as the list of runs has it. */
  constructor(run: string, private readonly attempt: number | null = null) {
    this.path = `api/v1/runs/${encodeURIComponent(run)}`;
  }

  private ask(what: string, given: Readonly<Record<string, string>> = {}): string {
    const query = new URLSearchParams(this.attempt === null ? given : { ...given, attempt: `${this.attempt}` }).toString();
    return `${this.path}/${what}${query ? `?${query}` : ""}`;
  }

  async load(): Promise<PageDocument> {
    return (this.page = await getJson<PageDocument>(this.ask("page")));
  }

  async matrix(metric: string, phase: string): Promise<Known<Matrix>> {
    const found = this.page?.matrices?.layers.find((one) => one.metric === metric && (one.phase ?? "") === phase);
    return found ? unpackMatrix(found) : ask(() => getMatrix(this.ask("matrix", { metric, ...(phase ? { phase } : {}) })));
  }

  window(metric: string, phase: string, ranks: readonly [number, number], steps: readonly [number, number]): Promise<Known<Matrix>> {
    return ask(() => getMatrix(this.ask("matrix", { metric, ...(phase ? { phase } : {}), ranks: ranks.join("-"), steps: steps.join("-") })));
  }

  async spans(step: number): Promise<Known<StepSpans>> {
    const found = this.page?.timelines.find((one) => one.step === step);
    return found ?? ask(() => getJson<Known<StepSpans>>(this.ask("timeline", { step: `${step}` })));
  }

  spanSteps(): null {
    return null;
  }

  follow(heard: (event: LiveEvent) => void): () => void {
    let stream: EventSource | null = null;
    let lastId = "";
    let isOver = false;
    let lostAt = 0;
    let lost: ReturnType<typeof setTimeout> | undefined;
    let again: ReturnType<typeof setTimeout> | undefined;
    let hidden: ReturnType<typeof setTimeout> | undefined;
    const open = (): void => {
      if (stream || isOver) return;
      const query = lastId ? `?last_event_id=${encodeURIComponent(lastId)}` : "";
      const opened = (stream = new EventSource(address(`${this.path}/events${query}`)));
      for (const kind of EVENTS) {
        opened.addEventListener(kind, (event) => {
          const message = event as MessageEvent<string>;
          clearTimeout(lost);
          lost = undefined;
          lostAt = 0;
          lastId = message.lastEventId || lastId;
          if (kind === "end") {
            isOver = true;
            close();
          }
          heard({ kind, data: JSON.parse(message.data) as Record<string, unknown> });
        });
      }
      opened.onerror = () => {
        lostAt ||= Date.now();
        lost ??= setTimeout(() => heard({ kind: "lost", data: { since: lostAt } }), LOST_AFTER_MS);
        if (opened.readyState !== EventSource.CLOSED) return; // it tries again by itself
        stream = null;
        clearTimeout(again);
        again = setTimeout(open, AGAIN_MS);
      };
    };
    const close = (): void => {
      stream?.close();
      stream = null;
      for (const timer of [lost, again]) clearTimeout(timer);
      lost = again = undefined;
    };
    // A tab that nobody sees asks for nothing.
    const seen = (): void => {
      clearTimeout(hidden);
      if (document.hidden) hidden = setTimeout(close, HIDDEN_MS);
      else open();
    };
    document.addEventListener("visibilitychange", seen);
    open();
    return () => { document.removeEventListener("visibilitychange", seen); clearTimeout(hidden); close(); };
  }
}

/** Two runs of a server. */
export class CompareSource extends HttpSource {
  constructor(private readonly query: string) {
    super("");
  }

  override load(): Promise<PageDocument> {
    const given = new URLSearchParams(this.query);
    return getJson<PageDocument>(`api/v1/compare?${new URLSearchParams({ a: given.get("a") ?? "", b: given.get("b") ?? "" })}`);
  }
}
