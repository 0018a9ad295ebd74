// The keyboard: find, help, rows of tables, and ways to other pages.

const PAGES = { o: "./", t: "tasks", d: "dead", w: "workers", p: "periodic", l: "live", a: "audit", f: "flows" };
let isGoing = false;

export function listenToKeys() {
  const help = document.getElementById("help");
  if (!help) return; // the page of the login
  const button = document.getElementById("help-button");
  button.hidden = false;
  button.addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (act(event.key, help)) event.preventDefault();
  });
}

function act(key, help) {
  if (isGoing) {
    isGoing = false;
    const page = PAGES[key];
    const link = page && document.querySelector(`nav a[href="${page}"]`);
    if (link) link.click();
    return Boolean(link);
  }
  switch (key) {
    case "/":
      return focus("header input");
    case "f":
      return focus("#filters input, #filters select");
    case "?":
      help.showModal();
      return true;
    case "g":
      isGoing = true;
      setTimeout(() => (isGoing = false), 1500);
      return true;
    case "ArrowDown":
    case "j":
      return move(1);
    case "ArrowUp":
    case "k":
      return move(-1);
    default:
      return false;
  }
}

function focus(selector) {
  const field = document.querySelector(selector);
  field?.focus();
  field?.select?.();
  return Boolean(field);
}

function move(step) {
  const links = [...document.querySelectorAll(".rows tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);
  if (!links.length) return false;
  const row = document.activeElement?.closest?.(".rows tbody tr");
  const at = row ? links.indexOf(row.querySelector("a")) + step : step > 0 ? 0 : links.length - 1;
  const link = links[Math.max(0, Math.min(links.length - 1, at))];
  link.focus();
  link.scrollIntoView({ block: "nearest" });
  return true;
}
