"""Messages whose producers have given them one `leasekit.id`: as many tasks, which cost no more calls than others."""

import threading

import leasekit
from tests.adapters.sqs.fake import Fake
from tests.waiting import eventually

CHANGE, DELETE = "ChangeMessageVisibilityBatch", "DeleteMessageBatch"
COUNT = 10


def most_in_a_call(aws: Fake, operation: str) -> int:
    return max((len(call["Entries"]) for call in aws.asked(operation)), default=0)


def test_their_heartbeats_and_their_reports_share_calls(aws: Fake) -> None:
    """Calls one after the other would take longer than the leases last, though SQS answers each of them."""
    attributes = {"leasekit.id": {"DataType": "String", "StringValue": "nightly"}}
    for n in range(COUNT):
        aws.put("q", str(n), attributes=attributes)
    holds = [aws.hold(DELETE) for _ in range(2)]  # as many calls as there are at once: meanwhile reports gather
    end = threading.Event()
    with leasekit.connect(f"sqs://q?region=eu-west-1&endpoint={aws.endpoint}&ttl=4&wait=1") as client:
        worker = leasekit.Worker(client, concurrency=COUNT)

        @worker.handler("k", run="thread")
        def waits(number: int) -> None:
            assert end.wait(60)

        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        eventually(lambda: most_in_a_call(aws, CHANGE) > 1, "a call with several heartbeats")
        end.set()
        eventually(lambda: len(client.__connection__().keeper.outbox) == COUNT, "all reports")
        for _, answer in holds:
            answer.set()
        eventually(lambda: all(message.deleted for message in aws.queues["q"].messages), "the deletions")
        worker.stop()
        thread.join(60)
    assert most_in_a_call(aws, DELETE) > 1
