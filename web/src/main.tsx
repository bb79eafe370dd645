import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./page.css";
import { EmbeddedSource } from "./data/embedded";
import { CompareSource, HttpSource, base, servedRun } from "./data/http";
import type { RunPage } from "./data/page";
import type { Source } from "./data/source";
import { followSystem, theme } from "./draw/theme";
import { ComparePage } from "./pages/compare_page";
import { HelpDialog, Toast } from "./pages/help";
import { RunView } from "./pages/run_page";
import { RunsPage } from "./pages/runs_page";
import { TipLayer } from "./parts/tip";
import { holdView } from "./state/findings";
import { followHistory, state } from "./state/fragment";
import { followKeys } from "./state/keys";
import { followRun } from "./state/live";
import { Run, run } from "./state/run";

function findSource(): Source | null {
  const data = document.getElementById("meshscope-data");
  if (data?.textContent) return new EmbeddedSource(data.textContent);
  if (servedRun !== null) return new HttpSource(servedRun, state.peek().at);
  return base !== null && /\/compare$/.test(location.pathname) ? new CompareSource(location.search) : null;
}

function App({ content }: { content: preact.ComponentChildren }) {
  void theme.value;
  return <>{content}<TipLayer /><HelpDialog /><Toast /></>;
}

function Problem({ text }: { text: string }) {
  return <main><p class="banner" role="alert">{text}</p></main>;
}

async function start(): Promise<void> {
  followHistory();
  followSystem();
  void theme.value;
  const root = document.getElementById("meshscope-page") ?? document.body.appendChild(document.createElement("div"));
  const source = findSource();
  if (!source) {
    render(<App content={<RunsPage />} />, root);
    return;
  }
  try {
    const page = await source.load();
    document.title = `${page.meta.title} · meshscope`;
    if (page.compare) render(<App content={<ComparePage page={page} compare={page.compare} source={source} />} />, root);
    else if (page.report) {
      run.value = new Run(page as RunPage, source);
      followKeys();
      followRun(source);
      render(<App content={<ShownRun />} />, root);
      if (state.peek().v) holdView(state.peek().v, 3000);
    } else render(<App content={<Problem text="This page has neither a run nor a comparison." />} />, root);
  } catch (error) {
    render(<Problem text={`The page could not be shown: ${error instanceof Error ? error.message : String(error)}`} />, root);
    throw error;
  }
}

function ShownRun() {
  const shown = run.value;
  return shown ? <RunView run={shown} /> : null;
}

void start();
