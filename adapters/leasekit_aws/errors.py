"""Map errors of boto3 to leasekit's errors.

    not applied            EndpointConnectionError, a connect timeout …        Unreached (Unavailable)
    unknown                a read timeout, a broken connection, 5xx            Unavailable
    not authorised         no, expired or insufficient credentials             Forbidden (Unavailable)
    try later              ThrottlingException, LimitExceededFault, 429 …      Throttled
    refused                any other error that the service itself answers     Answered (Refused), with its code
    not an answer          an unreadable answer, the page of a proxy           ProtocolError

Errors of credentials are a class of their own because they are often temporary: a rotated key, an instance role that
answers again. A result must not be lost because of them. A claim has nothing to lose, and raises them at once
(`refusing`).
"""

from collections.abc import Mapping
from typing import Any, cast

from botocore import exceptions as boto

from leasekit.errors import BackendError, ProtocolError, Refused, Throttled, Unavailable
from leasekit.task import Verdict


class Unreached(Unavailable):
    """The request did not reach the service: it was certainly not applied."""


class Forbidden(Unavailable):
    """The credentials are missing, expired or not sufficient; nothing was applied."""

    def refusing(self) -> Refused:
        return Refused(str(self))


class Answered(Refused):
    """The service itself answered with this error `code`."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_about_content(self) -> bool:
        """Whether the service says that it will never accept the content of the call.

        Any other code says nothing about a result: a proxy, a policy or a later version of the service may be its
        cause.
        """
        return self.code in _CONTENT


def verdict_of(task_id: str, error: BackendError) -> Verdict:
    """Return the verdict on an item whose call has failed, but may be sent again."""
    if isinstance(error, Throttled):
        return Verdict(id=task_id, verdict="throttled", retry_after=error.retry_after)
    return Verdict(id=task_id, verdict="failed", reason=f"{type(error).__name__}: {error}")


def meaning(error: Exception) -> BackendError:
    """Return the `BackendError` for an error of a call."""
    says = f"{type(error).__name__}: {str(error)[:_LONGEST]}"
    if isinstance(error, BackendError):
        return error
    if isinstance(error, boto.HTTPClientError) and isinstance(within := error.kwargs.get("error"), BackendError):
        return within  # raised while botocore sent the request
    if isinstance(error, boto.ClientError):
        return _meaning_of_answer(error)
    if isinstance(error, _CREDENTIALS):
        return Forbidden(f"no usable AWS credentials: {says}")
    if isinstance(error, _UNREACHED):
        return Unreached(says)
    if isinstance(error, _SETTINGS):
        return Refused(says)
    if isinstance(error, (boto.BotoCoreError, OSError)) and not isinstance(error, boto.ParamValidationError):
        return Unavailable(says)
    # Also errors inside botocore, which does not expect, for example, a number as an error's code.
    return Refused(says) if isinstance(error, boto.ParamValidationError) else ProtocolError(says)


def _meaning_of_answer(error: boto.ClientError) -> BackendError:
    response = cast("Mapping[str, Any]", error.response)
    detail = _mapping_or_empty(response.get("Error"))
    metadata = _mapping_or_empty(response.get("ResponseMetadata"))
    code, status = str(detail.get("Code", "")), metadata.get("HTTPStatusCode")
    text = str(detail.get("Message", ""))
    says = f"{code[:100]}: {_PAGE if text.lstrip().startswith('<') else text[:_LONGEST]}"
    if status == 429 or code in _LATER:
        return Throttled(says)
    if not isinstance(status, int) or status >= 500 or code in _AWAY:
        return Unavailable(says)
    if not metadata.get("RequestId"):
        return ProtocolError(f"status {status} is not an answer of AWS (no request id): is there a proxy in between?")
    if code in _NOT_ALLOWED:
        return Forbidden(f"AWS refuses this call: {error.operation_name}: {says}")
    if code in _WHO:
        return Forbidden(f"AWS does not accept these credentials: {says}")
    return Answered(says, code=code)


def _mapping_or_empty(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


_LONGEST = 500
_PAGE = "the answer is a page of HTML or XML, not one of AWS: is it a proxy, or an emulator that lacks this call?"

_CREDENTIALS = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.ProfileNotFound,
    boto.NoAuthTokenError, boto.TokenRetrievalError, boto.SSOError, boto.MetadataRetrievalError,
    boto.RefreshWithMFAUnsupportedError,
)  # fmt: skip
_UNREACHED = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_SETTINGS = (boto.NoRegionError, boto.InvalidRegionError, boto.UnknownServiceError, boto.InvalidConfigError)

_LATER = frozenset({
    "ActivityWorkerLimitExceeded", "BandwidthLimitExceeded", "EC2ThrottledException", "KmsThrottlingException",
    "LimitExceededException", "LimitExceededFault", "PriorRequestNotComplete", "ProvisionedThroughputExceededException",
    "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException", "SlowDown", "ThrottledException",
    "Throttling", "ThrottlingException", "TooManyRequestsException", "TransactionInProgressException",
})  # fmt: skip
_AWAY = frozenset({"InternalFailure", "KmsInvalidStateException", "RequestTimeout", "ServiceUnavailable"})
_CONTENT = frozenset({
    "InvalidOutput", "InvalidParameterCombination", "InvalidParameterValue", "MissingParameter",
    "SerializationException", "ValidationError", "ValidationException",
})  # fmt: skip
_NOT_ALLOWED = frozenset({
    "AccessDenied", "AccessDeniedException", "KmsAccessDeniedException", "NotAuthorized", "OperationNotPermittedFault",
    "OptInRequired", "UnauthorizedOperation",
})  # fmt: skip
_WHO = frozenset({
    "AuthFailure", "ExpiredToken", "ExpiredTokenException", "IncompleteSignature", "IncompleteSignatureException",
    "InvalidClientTokenId", "InvalidSignatureException", "MissingAuthenticationToken",
    "MissingAuthenticationTokenException", "RequestExpired", "SignatureDoesNotMatch", "UnrecognizedClientException",
})  # fmt: skip
