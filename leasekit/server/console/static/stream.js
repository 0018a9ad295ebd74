// One stream for each browser: the page that was looked at last has it. Browsers open six connections to a server, and
// a stream keeps one for itself, so the seventh page would wait for ever.

const channel = new BroadcastChannel("leasekit-console");
const label = document.getElementById("link");
const AGAIN = 2000; // milliseconds, and up to as much more: pages that lost a server do not come back together

export function showState(state) {
  label.dataset.state = state;
  label.value = { live: "live", lost: "server lost", idle: "" }[state];
}

// Open `url` whenever this page is looked at. `listeners` are called by the names of events; `onIdle` once the stream
// has gone to another page, or the page is hidden; `onOpen` when it is there (again).
export function stream(url, { listeners, onOpen = () => {}, onIdle = () => {} }) {
  let source = null;
  let timer = 0;
  let last = "";

  function close(state) {
    clearTimeout(timer);
    source?.close();
    source = null;
    if (state) showState(state);
  }

  function open() {
    if (source || document.hidden) return;
    clearTimeout(timer);
    channel.postMessage("mine");
    const from = last ? `${url.includes("?") ? "&" : "?"}after=${encodeURIComponent(last)}` : "";
    source = new EventSource(url + from);
    source.onopen = () => {
      showState("live");
      onOpen();
    };
    source.onerror = () => {
      close("lost");
      timer = setTimeout(open, AGAIN * (1 + Math.random()));
    };
    for (const [name, listener] of Object.entries(listeners)) {
      source.addEventListener(name, (event) => {
        if (event.lastEventId) last = event.lastEventId;
        listener(event);
      });
    }
  }

  channel.onmessage = () => {
    if (!source) return;
    close("idle");
    onIdle();
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return open();
    close("idle");
    onIdle();
  });
  addEventListener("focus", open);
  addEventListener("pagehide", () => close());
  addEventListener("pageshow", open);
  open();
  return () => source !== null;
}
