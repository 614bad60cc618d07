"""Errors of the model store: what a person can act on, with an HTTP status and a stable code.

StoreError
 ├── InvalidName         400  a model name, repo id, revision, file name or digest that is not allowed
 ├── InvalidModelfile    400  a Modelfile that cannot be understood; names the line
 ├── ModelNotFound       404  not installed, or not on any source that was asked
 ├── UnsupportedFormat   422  the files are whole but hold nothing that can be run
 ├── BrokenFile          422  truncated, lying about its lengths, or not the bytes that were promised
 ├── AccessDenied        403  gated or private on the hub
 ├── ModelBusy           409  another pull or removal of the same repository is running
 ├── NameTaken           409  a model of this name is there already
 ├── ModelNotOwned       409  the model is in a registered folder, which Quire only reads
 ├── Cancelled           499  the caller asked to stop
 ├── HubUnreachable      503  no endpoint of the model hub answered in time
 ├── DownloadFailed      502  a source answered, but the bytes could not be had
 ├── TooLargeForDevice   507  the weights are more than the memory of the device that would run them
 ├── NotEnoughSpace      507  the data root's disk cannot hold the download
 ├── DataRootUnusable    500  the data root is missing, read-only or full
 ├── ChatNotFound        404  no saved chat has this id
 └── DatabaseUnusable    500  the database of chats and usage cannot be opened or written

Each message is one sentence of the form "what happened; what to do next."  This module knows neither HTTP
frameworks nor the engine; every module of `store` raises from here, `app` turns them into answers.
"""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    """Base of everything the store raises on purpose; `str(error)` is the sentence for people."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "store_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def reason(self) -> str:
        """What happened, without the next step: for a caller that has another way to go on."""
        return self.message.partition(";")[0].rstrip(".")


class InvalidName(StoreError):
    """A string from outside that must not reach a path or a URL."""

    status = 400
    code = "invalid_model_name"


class InvalidModelfile(StoreError):
    """A Modelfile that cannot be understood, or asks for what there is not."""

    status = 400
    code = "invalid_modelfile"


class ModelNotFound(StoreError):
    """Not installed here, or not on the source that was asked."""

    status = 404
    code = "model_not_found"


class UnsupportedFormat(StoreError):
    """The repository or directory holds no weights that this version can read."""

    status = 422
    code = "unsupported_model_format"


class BrokenFile(StoreError):
    """A file that is truncated, lies about its lengths, or is not what its digest promises."""

    status = 422
    code = "broken_file"


class AccessDenied(StoreError):
    """The hub knows the repository but does not give it to this token."""

    status = 403
    code = "access_denied"


class ModelBusy(StoreError):
    """Another pull or removal of the same repository is running."""

    status = 409
    code = "model_busy"


class NameTaken(StoreError):
    """A model of this name is there already, and is not to be replaced."""

    status = 409
    code = "name_taken"


class ModelNotOwned(StoreError):
    """The model is in a folder that was registered to be read; Quire neither writes nor deletes there."""

    status = 409
    code = "model_not_owned"


class Cancelled(StoreError):
    """The caller asked to stop; what was downloaded so far stays for the next attempt."""

    status = 499
    code = "cancelled"


class HubUnreachable(StoreError):
    """No endpoint of the model hub answered in time."""

    status = 503
    code = "hub_unreachable"


class DownloadFailed(StoreError):
    """A source answered but would not give the bytes, after all retries."""

    status = 502
    code = "download_failed"


class TooLargeForDevice(StoreError):
    """The weights are more than the memory of the device that would run them."""

    status = 507
    code = "insufficient_memory"


class NotEnoughSpace(StoreError):
    """The disk cannot hold what is about to be written; sizes in bytes."""

    status = 507
    code = "not_enough_space"

    def __init__(self, message: str, *, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DataRootUnusable(StoreError):
    """The data root is missing, read-only or full."""

    status = 500
    code = "data_root_unusable"


class ChatNotFound(StoreError):
    """No saved chat, or no message of it, has this id."""

    status = 404
    code = "chat_not_found"


class DatabaseUnusable(StoreError):
    """The database of chats and usage cannot be opened, read or written."""

    status = 500
    code = "database_unusable"
