// The live page: the latest events, a bounded number of rows, written at most once for each frame of the screen.
import { stream } from "./stream.js";
import { timeOf } from "./times.js";

const ROWS = 300;

export function followEvents(table) {
  const body = table.tBodies[0];
  const count = document.getElementById("event-count");
  const hold = document.getElementById("hold");
  let waiting = []; // events that are not in the table yet, the latest ROWS of them
  let seen = 0;
  let left = 0;
  let isHeld = false;
  let isAsked = false;

  function take(event) {
    seen += 1;
    waiting.push(JSON.parse(event.data));
    if (waiting.length > 2 * ROWS) waiting = waiting.slice(-ROWS);
    ask();
  }

  function ask() {
    if (isAsked || isHeld) return;
    isAsked = true;
    requestAnimationFrame(write);
  }

  function write() {
    isAsked = false;
    const rows = document.createDocumentFragment();
    for (const event of waiting.slice(-ROWS).reverse()) rows.append(rowOf(event));
    waiting = [];
    body.prepend(rows);
    while (body.rows.length > ROWS) body.lastElementChild.remove();
    tell();
  }

  function tell(note = "") {
    const more = left ? `, and ${left.toLocaleString("en")} that came too fast to show` : "";
    count.value = `${seen.toLocaleString("en")} ${seen === 1 ? "event" : "events"}${more}${note}`;
  }

  hold.hidden = false;
  hold.addEventListener("click", () => {
    isHeld = !isHeld;
    hold.setAttribute("aria-pressed", String(isHeld));
    hold.textContent = isHeld ? "Go on" : "Hold";
    if (!isHeld) ask();
  });
  const listeners = {
    skipped: (event) => {
      left += JSON.parse(event.data).count;
      tell();
    },
    missed: () => tell("; some before were missed"),
  };
  for (const name of NAMES) listeners[name] = take;
  stream(table.dataset.source, { listeners });
}

const NAMES = [
  "scheduled", "enqueued", "claimed", "started", "settled", "expired", "cancel_requested", "cancelled", "dropped",
  "rescheduled", "replaced", "redriven", "joined", "left", "draining", "undrained", "kind_changed", "gate_changed",
  "periodic_changed", "firing",
];

function rowOf(event) {
  const row = document.createElement("tr");
  const name = event.periodic ?? event.collection;
  row.append(
    cell(timeOf(event.at)),
    cell(event.event.replaceAll("_", " ") + (event.mode ? `: ${event.mode}` : "")),
    cell(event.kind && link("kind", "kind", event.kind)),
    cell(event.id ? link("task", "id", event.id, "id") : name && text(name)),
    cell(event.status?.replaceAll("_", " "), "wide"),
    cell(event.worker && link("tasks", "worker", event.worker), "wide clip"),
    cell(event.outcome, "wide"),
  );
  return row;
}

function cell(content, className = "") {
  const made = document.createElement("td");
  made.className = className;
  if (content) made.append(content);
  return made;
}

function text(value) {
  const made = document.createElement("bdi");
  made.textContent = value;
  return made;
}

function link(page, name, value, className = "") {
  const made = document.createElement("a");
  made.href = `${page}?${new URLSearchParams({ [name]: value })}`;
  made.className = className;
  made.append(text(value));
  return made;
}
