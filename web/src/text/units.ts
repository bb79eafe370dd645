// Units as in the terminal (src/meshscope/core/unit_text.py): three significant digits.

function threeDigits(value: number): string {
  if (value >= 99.95) return value.toFixed(0);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

export function duration(ns: number): string {
  if (ns < 0) return `−${duration(-ns)}`;
  if (ns < 1) return ns === 0 ? "0 ns" : "<1 ns";
  for (const [unit, factor] of [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9]] as const) {
    const digits = threeDigits(ns / factor);
    if (Number(digits) < (unit === "s" ? 100 : 1000)) return `${digits} ${unit}`;
  }
  const seconds = Math.round(ns / 1e9);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
  const minutes = Math.round(ns / 60e9);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** With its sign; nothing at all is a middle dot. */
export function change(ns: number): string {
  return ns > 0 ? `+${duration(ns)}` : duration(ns);
}

export function memory(bytes: number): string {
  if (bytes < 0) return `−${memory(-bytes)}`;
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 999.5) return unit === "B" ? `${value.toFixed(0)} B` : `${threeDigits(value)} ${unit}`;
    value /= 1024;
  }
  return `${threeDigits(value)} TiB`;
}

export function bandwidth(bytesPerS: number): string {
  let value = bytesPerS;
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 999.5) return unit === "B" ? `${value.toFixed(0)} B/s` : `${threeDigits(value)} ${unit}/s`;
    value /= 1000;
  }
  return `${threeDigits(value)} GB/s`;
}

export function ratio(value: number): string {
  const percent = value * 100;
  const size = Math.abs(percent);
  const sign = percent < 0 ? "−" : "";
  if (size === 0) return "0 %";
  if (size >= 9.95) return `${sign}${size.toFixed(0)} %`;
  if (size >= 0.995) return `${sign}${size.toFixed(1)} %`;
  if (size < 0.00095) return "<0.001 %";
  return `${sign}${size.toFixed(1 - Math.floor(Math.log10(size)))} %`;
}

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

export function plural(value: number, noun: string, nouns = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

export function rate(perS: number, unit: string): string {
  if (perS >= 99.95) return `${count(perS)} ${unit}/s`;
  return `${perS >= 0.1 ? threeDigits(perS) : perS.toPrecision(2)} ${unit}/s`;
}

/** A logged value with four significant digits. */
export function logged(value: number): string {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size))));
}

/** A logged value on an axis: three digits, no zeros at its end. */
export function brief(value: number): string {
  const size = Math.abs(value);
  return value !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(1) : `${Number(value.toPrecision(3))}`;
}

/** To the minute; with 19 characters to the second. */
export function moment(unixNs: number, length = 16): string {
  const date = new Date(unixNs / 1e6);
  if (Number.isNaN(date.getTime())) return "";
  return `${date.toISOString().slice(0, length).replace("T", " ")} UTC`;
}

/** By the unit that evidence, metrics and axes carry. */
export function withUnit(value: unknown, unit: string): string {
  if (typeof value !== "number") return String(value);
  switch (unit) {
    case "ns":
      return duration(value);
    case "bytes":
    case "B":
      return memory(value);
    case "ratio":
      return ratio(value);
    case "bytes_per_s":
      return bandwidth(value);
    case "per_s":
      return rate(value, "").replace(" /s", "/s");
    case "":
      return Number.isInteger(value) ? count(value) : logged(value);
    case "tokens/s":
    case "samples/s":
    case "steps/s":
      return rate(value, unit.slice(0, -2));
    default:
      return `${Number.isInteger(value) ? count(value) : logged(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}`;
  }
}
