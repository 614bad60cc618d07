"""Streams stored tensors to a device: several threads read pieces of files into staging buffers, in order.

While one piece is copied to the device, the next ones are being read, so the slower of disk (or page
cache) and bus sets the pace.  Knows no model: the caller says where a tensor may land.  Used by the loader.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch

from engine.api.errors import BrokenCheckpoint
from engine.loading.read_plan import Part, Piece, StoredTensor, plan_pieces
from engine.loading.staging import Staging

NUM_READERS = 8


def stream_tensors(
    tensors: Sequence[StoredTensor],
    staging: Staging,
    *,
    landing: Callable[[StoredTensor], torch.Tensor | None],
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    num_readers: int = NUM_READERS,
) -> Generator[tuple[StoredTensor, torch.Tensor]]:
    """Each tensor once, in order, on the device of `staging`, which must be entered.

    A tensor is complete for work on the current stream, not for the host.  `landing` may give the memory
    it shall be put in: contiguous, of the tensor's shape and dtype; None takes new memory.  `on_bytes` gets
    the bytes sent on so far.  Close the iterator when it is not used up.  Raises `BrokenCheckpoint` for a
    file that ends early or cannot be read.
    """
    sent_bytes = 0
    target = torch.empty(0)
    with closing(read_pieces(plan_pieces(tensors, staging.piece_bytes), staging, num_readers)) as pieces:
        for piece, buffer in pieces:
            for part in piece.parts:
                if part.is_first:
                    target = _target(part.tensor, landing(part.tensor), staging.device)
                _copy_part(part, buffer, target)
                if part.is_last:
                    yield part.tensor, target
            sent_bytes += piece.num_bytes
            on_bytes(sent_bytes)


def read_pieces(
    pieces: Sequence[Piece], staging: Staging, num_readers: int = NUM_READERS
) -> Generator[tuple[Piece, torch.Tensor]]:
    """Each piece in order with a buffer that begins with its bytes.

    The buffer is filled anew once the iterator moves on and the copies enqueued by then are done.
    Errors as `stream_tensors`; no thread is left when the iterator ends or is closed.
    """
    upcoming = iter(pieces)
    buffer_bytes = max((piece.num_bytes for piece in pieces), default=0)
    reading: deque[tuple[Piece, torch.Tensor, Future[None]]] = deque()
    readers = ThreadPoolExecutor(num_readers, thread_name_prefix="weight-reader")
    try:
        num_buffers = 0
        following = next(upcoming, None)
        while reading or following:
            is_waiting = not reading or not reading[0][2].done()
            # One more buffer only while there is nothing to send: pinning memory takes longer than filling it.
            if following and is_waiting and num_buffers < staging.num_buffers:
                buffer, wait_until_free = staging.new_buffer(buffer_bytes), _do_not_wait
                num_buffers += 1
            else:
                piece, buffer, filled = reading.popleft()
                filled.result()
                yield piece, buffer
                wait_until_free = staging.fence()
            if following:
                reading.append((following, buffer, readers.submit(_fill, following, buffer, wait_until_free)))
                following = next(upcoming, None)
    finally:
        readers.shutdown(wait=True, cancel_futures=True)


def _do_not_wait() -> None:
    """A new buffer is free."""


def _fill(piece: Piece, buffer: torch.Tensor, wait_until_free: Callable[[], None]) -> None:
    """Read a piece into the start of `buffer`; the interpreter lock is free meanwhile."""
    wait_until_free()
    # Not through numpy, which would forbid to free the buffer.
    unread = memoryview((ctypes.c_uint8 * piece.num_bytes).from_address(buffer.data_ptr())).cast("B")
    try:
        with piece.path.open("rb", buffering=0) as file:
            file.seek(piece.offset, os.SEEK_SET)
            while unread:
                count = file.readinto(unread)
                if not count:
                    raise BrokenCheckpoint(
                        f"{piece.path.name} ends in the middle of its tensors; remove it and pull the model again."
                    )
                unread = unread[count:]
    except OSError as error:
        raise BrokenCheckpoint(
            f"{piece.path.name} cannot be read ({error.strerror or error}); check the disk, or pull the model again."
        ) from error


def _target(tensor: StoredTensor, landing: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if landing is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    assert landing.is_contiguous() and landing.dtype == tensor.dtype and landing.shape == tensor.shape, tensor.name
    return landing


def _copy_part(part: Part, buffer: torch.Tensor, target: torch.Tensor) -> None:
    """As bytes, because in the file a tensor need not be aligned to its dtype."""
    if part.num_bytes:
        target_bytes = target.view(-1).view(torch.uint8)
        source = buffer.narrow(0, part.position, part.num_bytes)
        target_bytes.narrow(0, part.start, part.num_bytes).copy_(source, non_blocking=True)
