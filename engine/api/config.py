"""`EngineConfig`: everything that is fixed for the life of one engine.

Built once, by `engine.LLM` or by the daemon's supervisor, and sent to the worker in the
first frame.  "auto" is resolved into other objects (`Limits`, `CachePlan`), never
written back here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Quantization = Literal["auto", "none", "int8"]
WaitPolicy = Literal["auto", "spin", "yield"]
BLOCK_SIZES = (16, 32, 64)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine.

    `model` is a checkpoint directory or a GGUF file, already on this machine.
    `memory_budget_bytes` is the absolute share of the device this engine may use; None
    lets the engine take `gpu_memory_utilization` of the device's total.
    `num_kv_blocks` overrides the size computed from the budget.
    `max_num_seqs` (sequences) and `max_num_batched_tokens` bound one step; None chooses by device.
    `enable_cuda_graphs` captures decode steps and short prompts on NVIDIA GPUs; without, each kernel is launched apart.
    `quantization` concerns weights on the CPU: "auto" computes with a GGUF file's own quantised weights and takes
    others as they are, "int8" quantises those too, "none" expands quantised weights to float32.
    `num_threads` compute on the CPU, None: one per core; `pin_threads` keeps each on a core of its own;
    `wait_policy` says how they wait for one another within a step: "spin", or "yield" the core at once, which is
    kinder to other programs; "auto" spins where there is a core for every thread.
    `cache_dir` is where compiled kernels and the like are kept between starts; None means the user's data root.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    memory_budget_bytes: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enable_cuda_graphs: bool = True
    num_threads: int | None = None
    pin_threads: bool = False
    wait_policy: WaitPolicy = "auto"
    seed: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, not {self.block_size}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}."
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
