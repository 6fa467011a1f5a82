// Numbers as people read them.

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => whole.format(value ?? 0);

/** "1 chunk", "2 chunks". */
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export const share = (value) => {
  const percent = value * 100;
  return `${percent > 0 && percent < 10 ? tenths.format(percent) : Math.round(percent)} %`;
};

export function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const step = Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  const scaled = value / 1000 ** step;
  return `${scaled < 10 && step > 0 ? scaled.toFixed(1) : whole.format(Math.round(scaled))} ${units[step]}`;
}

export function seconds(value) {
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return `${Math.round(value / 60)} min`;
}

/** How long ago a time in seconds since 1970 was. */
export function ago(at_s) {
  const passed = Math.max(0, Date.now() / 1000 - at_s);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 86_400) return `${plural(Math.round(passed / 3600), "hour")} ago`;
  return `${plural(Math.round(passed / 86_400), "day")} ago`;
}

/** "3.4 times", and "12 times" above ten. */
export const times = (value) =>
  `${value < 10 ? tenths.format(value) : whole.format(Math.round(value))} times`;

/** The last part of a path or an address. */
export const baseName = (path) =>
  path
    .replace(/[/\\]+$/, "")
    .split(/[/\\]/)
    .pop() || path;
