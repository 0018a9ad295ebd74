"""Leases in a poller of Amazon SWF: leasekit adds the three lines with `lease` and `held`.

The loop ends when a poll is empty. Domain, workflow and credentials are yours, or those of a test.
Requires the extra swf (in a clone: `pip install '.[swf]'`), and AWS_DEFAULT_REGION.
"""
# The stubs of boto3 cover only installed services:
# pyright: reportUnknownMemberType=false

import json
import time
from collections.abc import Mapping
from typing import Any

import boto3
from botocore.config import Config

from leasekit_swf import lease

swf = boto3.client("swf", config=Config(read_timeout=70))  # a poll takes up to 60 s


def poll() -> Mapping[str, Any]:
    return swf.poll_for_activity_task(domain="media", taskList={"name": "render"}, identity="render-1")


def render(pages: int) -> str:
    for page in range(pages):
        time.sleep(0.05)  # the work; heartbeats go on meanwhile
        print("page", page)
    return f"{pages} pages"


while (activity := poll()).get("taskToken"):
    pages = json.loads(activity["input"])["pages"]
    with lease(activity, client=swf, ttl=300) as held:
        held.complete(render(pages))
