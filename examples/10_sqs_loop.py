"""Leases in a loop over Amazon SQS: leasekit adds the two lines with `lease`.

The loop ends when a poll is empty. Queue and credentials are yours, or those of a test.
Requires `pip install 'leasekit[sqs]'`, and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 cover only installed services:
# pyright: reportUnknownMemberType=false, reportTypedDictNotRequiredAccess=false

import sys
import time

import boto3

from leasekit_sqs import lease

sqs = boto3.client("sqs")
url = sqs.get_queue_url(QueueName=sys.argv[1])["QueueUrl"]


def render(pages: int) -> None:
    for page in range(pages):
        time.sleep(0.05)  # the work; heartbeats go on meanwhile
        print("page", page)


while messages := sqs.receive_message(QueueUrl=url, WaitTimeSeconds=1).get("Messages"):
    for message in messages:
        with lease(message, queue_url=url, client=sqs):
            render(int(message["Body"]))
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
