"""Whose token is it?  Asked of a hub by its own library.

Knows nothing of where tokens are kept.  Called by `quire login`.
"""

from __future__ import annotations

import json
from typing import Any

from store.background import in_background
from store.errors import AccessDenied, HubUnreachable

_REFUSED = (401, 403)
_MAX_NAME_LETTERS = 100


def account_name(endpoint: str, token: str, timeout_s: float) -> str:
    """The account that `token` belongs to.  Raises AccessDenied (none) or HubUnreachable, after `timeout_s` at most."""
    # Here, since importing it takes as long as many a command.
    from huggingface_hub import HfApi

    def ask() -> Any:
        # Both are given: left out, the library takes those of its own environment.
        return HfApi(endpoint=endpoint, token=token).whoami(token=token)

    question = in_background(ask)
    try:
        failure = question.exception(timeout_s)
    except TimeoutError as error:
        raise HubUnreachable(f"{endpoint} did not answer within {timeout_s:g} s; try again later.") from error
    if failure is not None:
        raise _told(endpoint, failure) from failure
    answer = question.result()
    name = answer.get("name") if isinstance(answer, dict) else None
    if not isinstance(name, str) or not name:
        raise HubUnreachable(f"{endpoint} does not say whose token this is; try again later.")
    return "".join(filter(str.isprintable, name))[:_MAX_NAME_LETTERS]


def _told(endpoint: str, failure: BaseException) -> AccessDenied | HubUnreachable:
    """Any failure: what a broken connection raises is of the library's HTTP client, which is another every year."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(failure, json.JSONDecodeError | UnicodeDecodeError):
        return HubUnreachable(f"{endpoint} does not answer as a model hub does; check its address.")
    if not isinstance(failure, HfHubHTTPError):
        reason = (str(failure).splitlines() or [type(failure).__name__])[0].rstrip(".")
        return HubUnreachable(f"{endpoint} failed ({reason}); try again later.")
    status = failure.response.status_code
    if status in _REFUSED:
        return AccessDenied(f"{endpoint} does not know this token; copy it again from {endpoint}/settings/tokens.")
    return HubUnreachable(f"{endpoint} answered with HTTP status {status}; try again later.")
