"""Bring files over HTTP onto the disk: several at once, in ranges, resumed, verified.

Callers import from here.  Knows nothing of hubs, of names or of the cache layout.
"""

from store.transfer.credentials import Credentials
from store.transfer.fetcher import Downloader
from store.transfer.partial_file import credited_bytes
from store.transfer.policy import RetryPolicy, TransferShape
from store.transfer.rate_limit import RateLimit
from store.transfer.remote_file import FetchedFile, RemoteFile

__all__ = [
    "Credentials",
    "Downloader",
    "FetchedFile",
    "RateLimit",
    "RemoteFile",
    "RetryPolicy",
    "TransferShape",
    "credited_bytes",
]
