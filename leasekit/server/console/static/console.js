// The console's own script: what pages do besides being read. Each page also works without it.
import { followEvents } from "./events.js";
import { listenToKeys } from "./keys.js";
import { keepFresh } from "./live.js";
import { keepTimes } from "./times.js";

keepTimes();
listenToKeys();
document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" }); // on a phone
const events = document.getElementById("events");
if (events) followEvents(events);
else if ("live" in document.body.dataset) keepFresh();
const rest = document.querySelector("form[data-continue]");
if (rest) setTimeout(() => rest.requestSubmit(), 300); // the next steps of an act on many tasks
const onward = document.querySelector("a[data-continue]");
if (onward) setTimeout(() => location.replace(onward.href), 50); // a search that has found nothing yet
