"""The shared part of the AWS adapters: boto3 in threads, its errors, long polls that outlive their claims."""

from leasekit_aws.addresses import Options, options
from leasekit_aws.backend import AwsBackend
from leasekit_aws.boto_clients import BotoClients, Call
from leasekit_aws.service import Service
from leasekit_aws.shared_keepers import adopt, close_all
from leasekit_aws.values import failure_json, json_text, payload

__all__ = [
    "AwsBackend", "BotoClients", "Call", "Options", "Service", "adopt", "close_all", "failure_json", "json_text",
    "options", "payload",
]  # fmt: skip
