"""An activity worker of AWS Step Functions made safe: the three lines with `lease` and `held` are what was added.

It ends when a poll has brought nothing. The activity's ARN is its argument; credentials are yours, or those of a test.
It needs `pip install 'leasekit[sfn]'`, and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 know only services that are installed:
# pyright: reportUnknownMemberType=false

import json
import sys
import time

import boto3
from botocore.config import Config

from leasekit_sfn import lease

sfn = boto3.client("stepfunctions", config=Config(read_timeout=70))  # a poll takes up to 60 s
arn = sys.argv[1]


def resize(width: int) -> dict[str, int]:
    time.sleep(0.05)  # the work; heartbeats go on meanwhile
    return {"width": width, "height": width * 3 // 4}


while (activity := sfn.get_activity_task(activityArn=arn, workerName="resize-1")).get("taskToken"):
    width = json.loads(activity["input"])["width"]
    with lease(activity, client=sfn, ttl=60) as held:
        held.complete(resize(width))
