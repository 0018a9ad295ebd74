// Keep an open page up to date: fetch it again when something has happened, and put what has changed in its place.
import { showTimes } from "./times.js";
import { showState, stream } from "./stream.js";

const POLL = 5000; // milliseconds between two looks of a page that has no stream
let isRunning = false;
let isWanted = false;

export function keepFresh() {
  const isStreaming = stream("pulse", { listeners: { pulse: refresh }, onOpen: refresh });
  setInterval(() => {
    if (!document.hidden && !isStreaming()) refresh();
  }, POLL);
}

async function refresh() {
  isWanted = true;
  if (isRunning || document.hidden) return;
  isRunning = true;
  try {
    while (isWanted) {
      isWanted = false;
      const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "error" });
      if (answer.ok) replaceParts(new DOMParser().parseFromString(await answer.text(), "text/html"));
      else if (answer.status === 401) location.reload();
    }
  } catch {
    showState("lost");
  } finally {
    isRunning = false;
  }
}

function replaceParts(page) {
  for (const part of document.querySelectorAll("[data-part]")) {
    const fresh = page.getElementById(part.id);
    if (!fresh || isSame(part, fresh)) continue;
    for (const details of part.querySelectorAll("details[id]")) {
      const twin = fresh.querySelector(`#${CSS.escape(details.id)}`);
      if (twin) twin.open = details.open;
    }
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const scrolled = [...part.querySelectorAll("pre, .table")].map((each) => each.scrollLeft);
    part.replaceWith(fresh);
    [...fresh.querySelectorAll("pre, .table")].forEach((each, i) => (each.scrollLeft = scrolled[i] ?? 0));
    if (focused) twinOf(focused, fresh)?.focus({ preventScroll: true });
  }
  showTimes();
}

// Relative times differ at each look, and are kept up to date here: they are no change.
const plain = (part) => part.innerHTML.replace(/(<time [^>]*>)[^<]*/g, "$1").replaceAll(' open=""', "");
const isSame = (part, fresh) => plain(part) === plain(fresh);

function twinOf(element, within) {
  const link = element.getAttribute("href");
  if (link) return within.querySelector(`a[href="${CSS.escape(link)}"]`);
  return element.id ? within.querySelector(`#${CSS.escape(element.id)}`) : null;
}
