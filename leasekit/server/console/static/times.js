// Relative times: each says how long ago its moment is, and moves on by itself.

const SKEW = Date.parse(document.body.dataset.now) - Date.now(); // what the clock of the server is ahead
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function keepTimes() {
  showTimes();
  setInterval(() => {
    if (!document.hidden) showTimes();
  }, 1000);
  document.addEventListener("visibilitychange", showTimes);
}

export function showTimes() {
  const now = Date.now() + SKEW;
  for (const time of document.getElementsByTagName("time")) {
    const text = distance(now - Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}

export function timeOf(moment) {
  const time = document.createElement("time");
  time.dateTime = moment;
  time.title = `${moment.replace("T", " ").slice(0, 23).replace("Z", "")} UTC`;
  time.textContent = distance(Date.now() + SKEW - Date.parse(moment));
  return time;
}

function distance(milliseconds) {
  const seconds = Math.abs(milliseconds) / 1000;
  const [size, unit] = UNITS.find(([each]) => seconds >= each) ?? UNITS.at(-1);
  const text = `${Math.floor(seconds / size)} ${unit}`;
  return milliseconds >= 0 || seconds < 1 ? `${text} ago` : `in ${text}`;
}
