"""All kernels, by what they are compiled for.  Their factories say what arguments they take and what they do.

Imports none of the modules that hold them, which need the compiler.  Used by whoever records a step:
`engine.cpu.ops`, `engine.attention.compiled_paged` and `engine.runner.recorded_steps`; and by `engine.cpu.team`.
"""

from __future__ import annotations

from engine.cpu.activations import max_block_rows, splits_floats, uses_amx
from engine.cpu.attention_shape import AttentionShape, max_sums
from engine.cpu.kernel import Kernel

_PACK, _ROWS, _FLOATS = "engine.cpu.pack_kernels", "engine.cpu.row_kernels", "engine.cpu.float_kernels"
_NORMS = "engine.cpu.layer_norm"


def matrix_kernel(bits: int, is_symmetric: bool) -> Kernel:
    constants = (bits, is_symmetric, max_block_rows(), uses_amx())
    return Kernel("engine.cpu.matrix_kernels", "matrix", constants)


def norm_pack_kernel() -> Kernel:
    return Kernel(_PACK, "norm_pack", (max_block_rows(),))


def pack_kernel() -> Kernel:
    return Kernel(_PACK, "pack", (max_block_rows(),))


def gate_pack_kernel() -> Kernel:
    return Kernel(_PACK, "gate_pack", (max_block_rows(),))


def embed_packed_kernel(bits: int, is_symmetric: bool) -> Kernel:
    return Kernel(_ROWS, "embed_packed", (bits, is_symmetric))


def float_matrix_kernel(number_format: int) -> Kernel:
    """`number_format` is a dtype's place in `engine.layers.packed_floats.FLOAT_DTYPES`."""
    return Kernel(_FLOATS, "float_matrix", (number_format, max_block_rows()))


def norm_floats_kernel() -> Kernel:
    return Kernel(_FLOATS, "norm_floats", (max_block_rows(),))


def plain_floats_kernel() -> Kernel:
    return Kernel(_FLOATS, "plain_floats", (max_block_rows(),))


def gate_floats_kernel() -> Kernel:
    return Kernel(_FLOATS, "gate_floats", (max_block_rows(),))


def embed_floats_kernel(number_format: int) -> Kernel:
    """`number_format` as of `float_matrix_kernel`."""
    return Kernel(_FLOATS, "embed_floats", (number_format,))


def gather_kernel(block_size: int) -> Kernel:
    return Kernel(_ROWS, "gather", (block_size,))


def rotation_kernel() -> Kernel:
    return Kernel(_ROWS, "rotation")


def add_kernel() -> Kernel:
    return Kernel(_ROWS, "add")


def select_rows_kernel() -> Kernel:
    return Kernel(_ROWS, "select_rows")


def likeliest_kernel() -> Kernel:
    return Kernel(_ROWS, "likeliest")


def plan_kernel(tile_tokens: int) -> Kernel:
    return Kernel("engine.cpu.attention_plan", "plan_attention", (tile_tokens,))


def store_kernel(head_dim: int, block_size: int, item_bytes: int, has_norms: bool) -> Kernel:
    return Kernel("engine.cpu.attention_store", "store_heads", (head_dim, block_size, item_bytes, has_norms))


def attention_kernel(shape: AttentionShape, block_size: int, item_bytes: int) -> Kernel:
    constants = (shape.head_dim, shape.group, shape.max_sums, block_size, item_bytes)
    return Kernel("engine.cpu.attention_kernels", "attention", constants)


def split_matrix_kernel(has_gelu: bool) -> Kernel:
    """This one and `split_attention_kernel` are for processors that `splits_floats` is true of."""
    return Kernel("engine.cpu.split_kernels", "split_matrix", (has_gelu,))


def gelu_floats_kernel() -> Kernel:
    return Kernel(_FLOATS, "gelu_floats", (max_block_rows(),))


def layer_norm_kernel() -> Kernel:
    return Kernel(_NORMS, "layer_norm", (splits_floats(), max_block_rows()))


def embed_norm_kernel() -> Kernel:
    return Kernel(_NORMS, "embed_norm", (splits_floats(), max_block_rows()))


def split_attention_kernel(head_dim: int) -> Kernel:
    return Kernel("engine.cpu.split_attention", "split_attention", (head_dim,))


def float_attention_kernel(head_dim: int) -> Kernel:
    return Kernel("engine.cpu.float_attention", "float_attention", (head_dim, max_sums(), max_block_rows()))


def pool_kernel(mode: int) -> Kernel:
    """`mode` is a place in `engine.cpu.ragged_shape.POOLING_MODES`."""
    return Kernel("engine.cpu.pooling_kernels", "pool", (mode,))


def lead_kernel() -> Kernel:
    """Runs a program as its first thread."""
    return Kernel("engine.cpu.team_loop", "lead", num_parameters=8)


def join_kernel() -> Kernel:
    """Helps with a program."""
    return Kernel("engine.cpu.team_loop", "join", num_parameters=8)
