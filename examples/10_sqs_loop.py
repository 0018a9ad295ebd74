"""A loop over Amazon SQS made safe: the two lines with `lease` are all that leasekit added to it.

It ends when a poll has brought nothing. Queue and credentials are yours, or those of a test.
It needs `pip install 'leasekit[sqs]'`, and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 know only services that are installed:
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
