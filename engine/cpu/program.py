"""`Recorder` and `Program`: a step as a fixed list of instructions over preallocated buffers.

While a model's forward is recorded, tensors are handles: they live on torch's meta device, hold no values,
and stand for a buffer.  Buffers have numbers until recording ends; then those that are in use at different times
get the same memory.  An operation that is not recorded gives a meta tensor that is no handle, which the next
recorded one refuses.  Knows no kernel; `engine.cpu.ops` and the attention backend record with it.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.cpu.activations import LANES
from engine.cpu.arena import ALIGNMENT, Piece, place
from engine.cpu.code_cache import kernel_address
from engine.cpu.kernel import Kernel
from engine.cpu.step import NUM_SAMPLES, NUM_TOKENS, SAMPLE_FIELDS, SEQUENCE_FIELDS
from engine.cpu.team import CLAIMED, INSIDE, PROGRAM_COLUMNS, Team

ARGUMENTS = 16
_FLOAT_BYTES = 4
_SET_STRIDE = 1024
_BUFFERS = 1 << 62
"""Where the addresses of buffers without memory begin: beyond any other argument of a kernel."""
_BUFFER_BYTES = 1 << 40
"""From one of those addresses to the next: more than any buffer takes."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step of a program: tokens, sequences, and sequences that sample."""

    max_tokens: int
    max_sequences: int
    max_samples: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of sequences lie: addresses and strides in bytes of `engine.runner.rows.RowTable`'s tables."""

    token_ids: int
    token_id_stride: int
    block_tables: int
    block_table_stride: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    """`packed` is where its rows also are as a product takes them, if anywhere; `stride` is 0 where they do not lie row
    by row."""

    address: int
    stride: int
    rows: int
    packed: int | None = None


class Program:
    """A recorded step: run it as often as you like.  `names` are its instructions' kernels.

    `cycles` is None, or what each instruction has taken in all runs since it was set, int64 [instructions].
    """

    def __init__(
        self, instructions: list[tuple[Kernel, tuple[int, ...]]], memory: list[object], code_folder: Path | None
    ) -> None:
        self.names = tuple(kernel.name for kernel, _ in instructions)
        self.cycles: np.ndarray | None = None
        self._arguments = np.zeros((len(instructions), ARGUMENTS), dtype=np.int64)
        self._instructions = np.zeros((len(instructions), PROGRAM_COLUMNS), dtype=np.int64)
        for index, (kernel, arguments) in enumerate(instructions):
            self._arguments[index, 1 : 1 + len(arguments)] = arguments
            address = kernel_address(kernel, code_folder)
            self._instructions[index] = address, self._arguments[index].ctypes.data
        self._memory = memory

    def __len__(self) -> int:
        return len(self._instructions)

    def run(self, team: Team, step: np.ndarray) -> None:
        """Compute one step, whose numbers are `step` int64 [STEP_SIZE] (`engine.cpu.step`)."""
        self._arguments[:, CLAIMED] = 0
        team.run(self._instructions, step, self.cycles)


class Recorder:
    """Collects instructions, and hands out the memory they work on.

    `sequences` int32 [max_sequences, 4], `token_ids` and `positions` int32 [max_tokens], `slots` int64 [max_tokens]
    and `samples` int32 [max_samples, 2] are addresses (`engine.cpu.step` says what is in them); `token_id_handle` and
    `position_handle` stand for two of them in a model's forward.  `code_folder` keeps compiled kernels between starts.
    """

    def __init__(self, capacity: Capacity, rows: Rows, team_size: int, code_folder: Path | None = None) -> None:
        self.max_tokens = _round_up(capacity.max_tokens, LANES)
        self.max_sequences = capacity.max_sequences
        self.max_samples = _round_up(capacity.max_samples, LANES)
        self.team_size = team_size
        self.block_tables = rows.block_tables
        self.block_table_stride = rows.block_table_stride
        self.row_token_ids = rows.token_ids
        self.row_token_id_stride = rows.token_id_stride
        self._code_folder = code_folder
        self._memory: list[object] = []
        self._instructions: list[tuple[Kernel, tuple[int, ...]]] = []
        self._buffers: dict[int, _Buffer] = {}
        self._sizes: list[tuple[int, int]] = []
        self._offsets: list[int] = []
        self._arena = 0
        self._zeros = (0, 0)
        self.sequence_records = np.zeros((self.max_sequences, SEQUENCE_FIELDS), dtype=np.int32)
        self.sample_records = np.zeros((self.max_samples, SAMPLE_FIELDS), dtype=np.int32)
        self._memory += (self.sequence_records, self.sample_records)
        self.sequences = self.sequence_records.ctypes.data
        self.samples = self.sample_records.ctypes.data
        self.token_ids = self.workspace(4 * self.max_tokens)
        self.positions = self.workspace(4 * self.max_tokens)
        self.slots = self.workspace(8 * self.max_tokens)
        self.token_id_handle = self._handle((self.max_tokens,), _Buffer(self.token_ids, 4, NUM_TOKENS))
        self.position_handle = self._handle((self.max_tokens,), _Buffer(self.positions, 4, NUM_TOKENS))

    def buffer(self, columns: int, rows: int = NUM_TOKENS) -> torch.Tensor:
        """A handle of float32 [max_tokens, columns], or [max_samples, columns] for `rows` NUM_SAMPLES."""
        stride = _spread(_round_up(columns, LANES) * _FLOAT_BYTES)
        num_rows = self._num_rows(rows)
        return self._handle((num_rows, columns), _Buffer(self._reserve(num_rows * stride), stride, rows))

    def token_numbers(self) -> tuple[torch.Tensor, np.ndarray]:
        """A handle of int32 [max_tokens], and its memory, which the caller fills before each step."""
        memory = np.zeros(self.max_tokens, dtype=np.int32)
        self._memory.append(memory)
        return self._handle((self.max_tokens,), _Buffer(memory.ctypes.data, 4, NUM_TOKENS)), memory

    def packed_rows(self, columns: int, packed: int) -> torch.Tensor:
        """A handle of rows that are only where `packed` says, as a product takes them."""
        return self._handle((self.max_tokens, columns), _Buffer(packed, 0, NUM_TOKENS, packed))

    def panels(self, columns: int, address: int) -> torch.Tensor:
        """A handle of rows that lie in panels (`engine.cpu.split_layout`)."""
        return self._handle((self.max_tokens, columns), _Buffer(address, 0, NUM_TOKENS))

    def note_packed(self, handle: torch.Tensor, packed: int) -> None:
        """Note that the rows of a handle's buffer are at `packed` too, as a product takes them."""
        self._buffers[id(handle)] = replace(self._buffer_of(handle), packed=packed)

    def packed(self, handle: torch.Tensor) -> int | None:
        """Where a handle's rows are as a product takes them, if anywhere."""
        return self._buffer_of(handle).packed

    def scratch(self, bytes_per_row: int, rows: int = NUM_TOKENS) -> int:
        """The address of memory without a shape, for instructions that follow one another."""
        return self._reserve(self._num_rows(rows) * bytes_per_row)

    def address(self, tensor: torch.Tensor) -> int:
        """Of a handle's buffer, or of a tensor on the CPU, which the program then keeps alive."""
        if tensor.device.type == "meta":
            return self._buffer_of(tensor).address
        self._memory.append(tensor)
        return tensor.data_ptr()

    def stride(self, handle: torch.Tensor) -> int:
        """Bytes from row to row of a handle's buffer."""
        stride = self._buffer_of(handle).stride
        assert stride, "these rows are packed, or in panels"
        return stride

    def rows(self, handle: torch.Tensor) -> int:
        """Which of the step's numbers counts the rows of a handle: NUM_TOKENS or NUM_SAMPLES."""
        return self._buffer_of(handle).rows

    def workspace(self, num_bytes: int) -> int:
        """The address of zeroed memory that lives as long as the program."""
        memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
        self._memory.append(memory)
        return _round_up(memory.ctypes.data, ALIGNMENT)

    def padded(self, values: torch.Tensor) -> int:
        """The address of a copy of float32 [n] with zeros behind it, up to a whole vector."""
        address = self.workspace(_round_up(values.nbytes, ALIGNMENT))
        _floats(address, len(values))[:] = values.numpy()
        return address

    def zeros(self, num_bytes: int) -> int:
        """The address of at least so many zero bytes, which nobody writes to."""
        if self._zeros[0] < num_bytes:
            self._zeros = num_bytes, self.workspace(num_bytes)
        return self._zeros[1]

    def add(self, kernel: Kernel, *arguments: int) -> None:
        """Append an instruction; its kernel finds the arguments behind its work counter, from 1 on."""
        assert 1 + len(arguments) <= INSIDE, f"{kernel.name} takes too many arguments"
        self._instructions.append((kernel, arguments))

    def finish(self) -> Program:
        """What was recorded, with memory for all buffers; those of living handles keep what the program writes."""
        self._offsets, num_bytes = place(self._lives())
        self._arena = self.workspace(num_bytes)
        placed = [(kernel, tuple(map(self._placed, arguments))) for kernel, arguments in self._instructions]
        return Program(placed, self._memory, self._code_folder)

    def view(self, handle: torch.Tensor) -> torch.Tensor:
        """The memory of a buffer in the finished program, as float32 of the handle's shape."""
        assert self._offsets, "buffers have no memory before the program is finished"
        buffer = self._buffer_of(handle)
        num_rows, columns = handle.shape
        row_floats = buffer.stride // _FLOAT_BYTES
        floats = torch.from_numpy(_floats(self._placed(buffer.address), num_rows * row_floats))
        return floats.view(num_rows, row_floats)[:, :columns]

    def _num_rows(self, rows: int) -> int:
        return self.max_samples if rows == NUM_SAMPLES else self.max_tokens

    def _reserve(self, num_bytes: int) -> int:
        """The address of a new buffer, of which only instructions and `_placed` make anything."""
        self._sizes.append((num_bytes, len(self._instructions)))
        return _BUFFERS + (len(self._sizes) - 1) * _BUFFER_BYTES

    def _lives(self) -> list[Piece]:
        """Each buffer from when it was made until it is last used, or to the end if its handle lives."""
        last = [first for _, first in self._sizes]
        for index, (_, arguments) in enumerate(self._instructions):
            for argument in arguments:
                if argument >= _BUFFERS:
                    last[(argument - _BUFFERS) // _BUFFER_BYTES] = index
        for buffer in self._buffers.values():
            if buffer.address >= _BUFFERS:
                last[(buffer.address - _BUFFERS) // _BUFFER_BYTES] = len(self._instructions)
        return [Piece(num_bytes, first, end) for (num_bytes, first), end in zip(self._sizes, last, strict=True)]

    def _placed(self, argument: int) -> int:
        """An argument of an instruction, with buffers where they are."""
        if argument < _BUFFERS:
            return argument
        number, within = divmod(argument - _BUFFERS, _BUFFER_BYTES)
        return self._arena + self._offsets[number] + within

    def _handle(self, shape: tuple[int, ...], buffer: _Buffer) -> torch.Tensor:
        handle = torch.empty(shape, dtype=torch.float32, device="meta")
        self._buffers[id(handle)] = buffer
        weakref.finalize(handle, self._buffers.pop, id(handle))
        return handle

    def _buffer_of(self, handle: torch.Tensor) -> _Buffer:
        buffer = self._buffers.get(id(handle))
        if buffer is None:
            raise TypeError("This tensor comes from an operation that is not recorded; add it to the Ops.")
        return buffer


def float_bits(number: float) -> int:
    """The bits of a float32, as kernels read it from their arguments."""
    return int.from_bytes(struct.pack("<f", number), "little")


def _floats(address: int, count: int) -> np.ndarray:
    """float32 [count] at `address`; its memory is kept alive elsewhere."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _spread(stride: int) -> int:
    """A row stride that does not put the same column of all rows into one set of a first-level cache."""
    return stride if stride % _SET_STRIDE else stride + ALIGNMENT


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
