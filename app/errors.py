"""Errors of the daemon itself, and how any error is described to a client.

AppError                    status 500  internal_error
├─ SettingsError            status 500  invalid_settings       refused before the daemon starts
├─ StartupError             status 500  startup_failed         port taken, another daemon runs
├─ BadRequest               status 400  invalid_request        names the field in `param`
├─ WrongTask                status 400  wrong_task             a chat model asked for vectors, and the like
├─ Unauthorized             status 401  invalid_api_key
├─ NotAllowed               status 403  not_allowed            foreign Host or Origin header
├─ JobNotFound              status 404  job_not_found
├─ ModelInUse               status 409  model_in_use
├─ ModelNotLoaded           status 409  model_not_loaded
├─ JobStopped               status 409  job_stopped            paused or cancelled by somebody
├─ ChatsOff                 status 409  chats_off              save_chats is false
├─ UnsupportedMediaType     status 415  unsupported_media_type
├─ QueueFull                status 429  queue_full             carries Retry-After
└─ ShuttingDown             status 503  shutting_down

`engine.api.errors` and `store.errors` carry `status`, `code` and `message` in the same
way, so `describe` turns any of them into an `ErrorBody`; anything unforeseen is logged with
its traceback and answered without.  Knows no web framework: `app.api.error_responses` does.
"""

from __future__ import annotations

import logging
import math

from app.schema.error import ErrorBody, ErrorDetail
from engine.api.errors import EngineError
from store.errors import StoreError

logger = logging.getLogger(__name__)


class AppError(Exception):
    """Base of the daemon's own errors; the message is one sentence that names the next step."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        return {}


class SettingsError(AppError):
    """A setting is unknown, has the wrong type, or contradicts another one."""

    code = "invalid_settings"


class StartupError(AppError):
    """The daemon cannot start here."""

    code = "startup_failed"


class BadRequest(AppError):
    """The request body is not what the route takes."""

    status = 400
    code = "invalid_request"


class WrongTask(AppError):
    """The model does something else than what it is asked for: it writes, makes vectors, or scores."""

    status = 400
    code = "wrong_task"


class Unauthorized(AppError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotAllowed(AppError):
    """The request comes through a host name or from a web page that this daemon does not serve."""

    status = 403
    code = "not_allowed"


class JobNotFound(AppError):
    """No job has this id, or it ended too long ago."""

    status = 404
    code = "job_not_found"


class JobStopped(AppError):
    """The job that a client follows was paused or cancelled."""

    status = 409
    code = "job_stopped"


class ModelInUse(AppError):
    """The model is in memory, so its files cannot go; or it has requests, so it cannot sleep."""

    status = 409
    code = "model_in_use"


class ChatsOff(AppError):
    """Nothing new is saved, because the user does not want it."""

    status = 409
    code = "chats_off"


class UnsupportedMediaType(AppError):
    """A body that is not JSON."""

    status = 415
    code = "unsupported_media_type"


class ModelNotLoaded(AppError):
    """What was asked is about a model in memory, and this one is not there."""

    status = 409
    code = "model_not_loaded"


class QueueFull(AppError):
    """The model already has as many open requests as `max_queue` allows; another may come in `retry_after_s`."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class ShuttingDown(AppError):
    """The daemon takes no more work because it was told to stop."""

    status = 503
    code = "shutting_down"


def error_body(status: int, message: str, code: str, param: str | None = None) -> ErrorBody:
    """The body beside an HTTP status, with the `type` that OpenAI clients expect there."""
    special = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = special.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorBody(ErrorDetail(message=message, type=kind, param=param, code=code))


def describe(error: Exception, where: str) -> tuple[int, ErrorBody]:
    """Status and body for any exception; one that nobody raised on purpose is logged and reveals nothing."""
    if isinstance(error, (AppError, EngineError, StoreError)):
        param = getattr(error, "param", None)
        return error.status, error_body(error.status, error.message, error.code, param)
    logger.error("Unexpected error in %s", where, exc_info=error)
    return 500, error_body(500, "Something went wrong inside the daemon; its log has the details.", AppError.code)
