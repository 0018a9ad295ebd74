"""A worker that speaks the protocol itself, with nothing but the standard library: a model for other languages.

`leasekit conformance -- python 15_any_language.py` checks it. In Python, use `leasekit.Worker` instead.
"""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

URL = os.environ["LEASEKIT_URL"]
WORKER = f"plain-{uuid.uuid4().hex[:8]}"
KIND = "conformance"
WAIT = 20  # seconds that a claim waits for a task

Json = dict[str, Any]


class Refused(Exception):
    """The server refused the request: a repeat would be refused too."""


def call(path: str, body: Json, timeout: float, until: float = float("inf")) -> Json:
    """Send a request, and repeat it until it is answered. Raises `Refused`, and TimeoutError at `until`."""
    pause = 0.1
    while time.monotonic() < until:
        try:
            return send(path, body, min(timeout, until - time.monotonic()))
        except urllib.error.HTTPError as error:
            answer = error.read()
            if error.code == 422 and b'"urn:leasekit:problem:refused"' in answer:
                raise Refused(answer.decode()) from None
            pause = max(pause, float(error.headers.get("retry-after") or 0))
        except (OSError, ValueError):  # no answer, or none of this server: the request may have been applied
            pass
        time.sleep(max(0, min(pause, until - time.monotonic())))
        pause = min(2 * pause, 5)
    raise TimeoutError


def send(path: str, body: Json, timeout: float) -> Json:
    """Send a request once. Raises OSError or ValueError unless this very request is answered."""
    name = uuid.uuid4().hex  # new for each try, so that the answer to another request is recognised
    headers = {"content-type": "application/json", "leasekit-request": name}
    request = urllib.request.Request(f"{URL}/v1/{path}", json.dumps(body).encode(), headers)  # noqa: S310 - our server
    with urllib.request.urlopen(request, timeout=max(timeout, 0.1)) as response:  # noqa: S310
        if response.headers.get("leasekit-request", name) != name:
            raise ValueError("this is the answer to another request")
        answer: Json = json.load(response)
        return answer


class Run:
    """A task under a lease, and the thread that runs it."""

    def __init__(self, task: Json, trusted_until: float) -> None:
        self.task = task
        self.lost = threading.Event()  # the lease has ended, or the task is cancelled: the handler must stop
        self.cancelled = False
        self.trusted_until = trusted_until
        self.thread = threading.Thread(target=self.run)
        self.heart = threading.Thread(target=self.keep)
        self.heart.start()
        self.thread.start()

    def must_stop(self) -> bool:
        return self.lost.is_set() or time.monotonic() >= self.trusted_until

    def run(self) -> None:
        outcome, result = handle(self)
        finished, over = outcome is not None, self.must_stop()
        self.lost.set()
        self.heart.join()
        if self.cancelled and not finished:
            self.report({"outcome": "cancelled"})
        elif not over and finished:
            self.report({"outcome": outcome, "result": result})

    def report(self, said: Json) -> None:
        item = {"id": self.task["id"], "token": self.task["token"], **said}
        call("results", {"worker": WORKER, "results": [item]}, timeout=5)

    def keep(self) -> None:
        """Renew the lease three times in each ttl, until the run has ended."""
        while not self.lost.wait(self.task["ttl"] / 4):
            beat = {"id": self.task["id"], "token": self.task["token"]}
            asked_at = time.monotonic()
            try:
                answer = send("heartbeats", {"worker": WORKER, "beats": [beat]}, timeout=self.task["ttl"] / 4)
            except urllib.error.HTTPError as error:
                self.lost.wait(float(error.headers.get("retry-after") or 0))
                continue  # the next one may arrive: the lease is trusted until then
            except (OSError, ValueError):
                continue
            verdict = answer["verdicts"][0]
            if verdict["verdict"] == "gone":
                self.lost.set()
            elif verdict["verdict"] == "renewed":
                self.trusted_until = asked_at + verdict["ttl"] - 0.2
                if verdict.get("cancel_requested"):
                    self.cancelled = True
                    self.lost.set()


def handle(run: Run) -> tuple[str | None, object]:
    """Do what the payload says; return the outcome, or None if the run had to stop."""
    payload = run.task["payload"]
    end = time.monotonic() + payload["seconds"]
    while not run.must_stop():
        urllib.request.urlopen(f"{payload['sign']}?attempt={run.task['attempt']}", timeout=5).close()  # noqa: S310
        if time.monotonic() >= end:
            return payload["outcome"], payload["result"]
        run.lost.wait(0.1)
    return None, None


def claim(limit: int) -> list[Run]:
    """Claim tasks; a claim whose answer is lost is repeated under its id."""
    body = {"worker": WORKER, "kinds": [KIND], "limit": limit, "wait": WAIT, "claim_id": uuid.uuid4().hex}
    while True:
        asked_at = time.monotonic()
        try:
            answer = send("claims", body, timeout=WAIT + 5)
            break
        except urllib.error.HTTPError as error:
            time.sleep(float(error.headers.get("retry-after") or 0.2))
        except (OSError, ValueError):
            time.sleep(0.2)
    granted_at = asked_at + answer["waited"]
    return [Run(task, granted_at + task["ttl"] - 0.2) for task in answer["tasks"]]


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    runs: list[Run] = []
    try:
        while True:
            runs = [run for run in runs if run.thread.is_alive()]
            if len(runs) < 10:
                runs += claim(10 - len(runs))
            else:
                time.sleep(0.02)
    except KeyboardInterrupt:  # the runs go on until they have ended
        for run in runs:
            run.thread.join()


if __name__ == "__main__":
    main()
