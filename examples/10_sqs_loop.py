"""Leases in a loop over Amazon SQS: leasekit adds the lines with `lease`, `watch`, `held` and the receive's last two.

The loop ends when a poll is empty. Queue and credentials are yours, or those of a test.
Requires the extra sqs (in a clone: `pip install '.[sqs]'`), and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 cover only installed services:
# pyright: reportUnknownMemberType=false, reportTypedDictNotRequiredAccess=false

import sys
import time

import boto3

from leasekit_sqs import lease, watch

sqs = boto3.client("sqs")
watch(sqs)  # before its first receive
url = sqs.get_queue_url(QueueName=sys.argv[1])["QueueUrl"]


def render(pages: int) -> str:
    time.sleep(0.05 * pages)  # the work; heartbeats go on meanwhile
    return f"{pages} pages"


def publish(book: str) -> None:
    print(book)  # the effect that must not happen twice


while messages := sqs.receive_message(
    QueueUrl=url,
    WaitTimeSeconds=1,
    VisibilityTimeout=300,
    MessageSystemAttributeNames=["ApproximateReceiveCount"],  # for held.attempt
).get("Messages"):
    for message in messages:
        with lease(message, queue_url=url, client=sqs, visibility_timeout=300) as held:
            book = render(int(message["Body"]))
            held.check()  # raises LeaseLost if another worker may have the message
            publish(book)
