"""Leases in an activity worker of AWS Step Functions: leasekit adds the three lines with `lease` and `held`.

The loop ends when a poll is empty. The argument is the activity's ARN; credentials are yours, or those of a test.
Requires the extra sfn (in a clone: `pip install '.[sfn]'`), and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 cover only installed services:
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
