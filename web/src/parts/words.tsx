// A sentence from the run or from us: what stands between backticks is a command.
import { cleanText } from "../text/names";

export function Words({ text }: { text: string }) {
  return <>{cleanText(text).split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</>;
}
