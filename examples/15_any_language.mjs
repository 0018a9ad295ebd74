// A worker that speaks the protocol itself, in JavaScript, with nothing but Node.js (20.3 or newer).
//
// `leasekit conformance -- node 15_any_language.mjs` checks it.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const URL = process.env.LEASEKIT_URL;
const WORKER = `node-${randomUUID().slice(0, 8)}`;
const KIND = "conformance";
const WAIT = 20; // seconds that a claim waits for a task
const MOST = 10; // tasks at once
const MARGIN = 0.2; // seconds before the end of a lease, at which its run stops

const now = () => performance.now() / 1000; // a clock that nobody sets

/** The server has answered, though not with success; `isFinal`: a repeat would be refused too. */
class Problem extends Error {
  constructor(status, body, retryAfter) {
    super(`${status}: ${body}`);
    this.isFinal = status === 422 && body.includes('"urn:leasekit:problem:refused"');
    this.retryAfter = retryAfter;
  }
}

/** Send a request once. Throws unless this very request is answered with success. */
async function send(path, body, timeout, stop) {
  const name = randomUUID(); // new for each try, so that the answer to another request is recognised
  const limit = AbortSignal.timeout(1000 * timeout);
  const response = await fetch(`${URL}/v1/${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", "leasekit-request": name },
    body: JSON.stringify(body),
    redirect: "error",
    signal: stop ? AbortSignal.any([limit, stop]) : limit,
  });
  const text = await response.text();
  if (!response.ok) throw new Problem(response.status, text, Number(response.headers.get("retry-after")) || 0);
  if ((response.headers.get("leasekit-request") ?? name) !== name) throw new Error("the answer to another request");
  return JSON.parse(text);
}

/** Claim tasks. A claim whose answer is lost is repeated under its id; one that `stop` interrupts is ended. */
async function claim(limit, stop) {
  const body = { worker: WORKER, kinds: [KIND], limit, wait: WAIT, claim_id: randomUUID() };
  for (let isEnding = false; ; ) {
    const askedAt = now();
    try {
      const answer = await send("claims", isEnding ? { ...body, limit: 0 } : body, WAIT + 5, isEnding ? null : stop);
      const grantedAt = askedAt + answer.waited;
      return answer.tasks.map((task) => ({ task, isEnding, trustedUntil: grantedAt + task.ttl - MARGIN }));
    } catch (error) {
      if (error.isFinal) throw error;
      isEnding = stop.aborted; // it may have been granted tasks: its end tells
      await sleep(1000 * Math.max(0.2, error.retryAfter ?? 0));
    }
  }
}

/** Report how a run has ended, until that is answered. The same report is repeated: it has one effect. */
async function report(task, said) {
  const item = { id: task.id, token: task.token, ...said };
  for (let pause = 0.1; ; pause = Math.min(2 * pause, 5)) {
    try {
      return await send("results", { worker: WORKER, results: [item] }, 5);
    } catch (error) {
      if (error.isFinal) throw error;
      await sleep(1000 * Math.max(pause, error.retryAfter ?? 0));
    }
  }
}

/** Renew the lease of a run four times in each ttl, until the run has ended. */
async function keep(run) {
  const beat = { id: run.task.id, token: run.task.token };
  let pause = run.task.ttl / 4;
  while (!run.over.signal.aborted) {
    await sleep(1000 * pause, undefined, { signal: run.over.signal }).catch(() => {});
    if (run.over.signal.aborted) return;
    pause = run.task.ttl / 4;
    const askedAt = now(); // the ttl counts from here: the answer may be late
    try {
      const answer = await send("heartbeats", { worker: WORKER, beats: [beat] }, pause, run.over.signal);
      const verdict = answer.verdicts[0];
      if (verdict.verdict === "renewed") run.trustedUntil = askedAt + verdict.ttl - MARGIN;
      run.isCancelled ||= Boolean(verdict.cancel_requested);
      if (verdict.verdict === "gone" || run.isCancelled) run.over.abort();
    } catch (error) {
      pause = Math.max(pause, error.retryAfter ?? 0); // the lease is trusted until then: the next one may arrive
    }
  }
}

/** Do what the payload says; return what to report, or null if the run must stop. */
async function handle(run) {
  const { seconds, sign, outcome, result } = run.task.payload;
  for (const end = now() + seconds; ; ) {
    if (run.over.signal.aborted || now() >= run.trustedUntil) return null;
    await (await fetch(`${sign}?attempt=${run.task.attempt}`)).arrayBuffer();
    if (now() >= end) return { outcome, result };
    await sleep(100);
  }
}

/** Run a task under its lease, and report how that ended. */
async function work(run) {
  run.over = new AbortController();
  const heart = keep(run);
  const said = await handle(run);
  run.over.abort();
  await heart;
  if (said !== null) await report(run.task, said);
  else if (run.isCancelled) await report(run.task, { outcome: "cancelled" });
} // else the lease was lost: another worker has the task, and nothing is to report

const stop = new AbortController();
process.on("SIGTERM", () => stop.abort());
const running = new Set();
while (!stop.signal.aborted) {
  if (running.size >= MOST) {
    await Promise.race(running);
    continue;
  }
  for (const run of await claim(MOST - running.size, stop.signal)) {
    if (run.isEnding) await report(run.task, { outcome: "release" });
    else {
      const working = work(run).finally(() => running.delete(working));
      running.add(working);
    }
  }
}
await Promise.all(running);
