"""`plan_device`: what models would take of a device, one beside the other, and what the first could then serve.

The arithmetic of `quire plan`: pure, on facts alone, with the planner's own rules (`footprint`, `demand`,
`placement`), so that what it says is what the daemon does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from app.residency.arithmetic.demand import need_of
from app.residency.arithmetic.footprint import BLOCK_SIZE, Footprint, Host, footprint
from app.residency.arithmetic.memory import DeviceMemory, is_gpu
from app.residency.arithmetic.placement import place
from app.residency.arithmetic.tenants import DeviceShare, Need, NoRoom, Tenant
from engine.api.config import Quantization
from store.facts import ModelFacts
from store.shape import dtype_bytes

CacheType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]

_CACHE_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Wish:
    """A model that is to be on the device, with the share that it is given, if any."""

    name: str
    facts: ModelFacts
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of the first model; None leaves it to the engine.

    `num_blocks` is a KV cache of known size in place of what the memory gives.
    """

    quantization: Quantization = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int = BLOCK_SIZE
    cache_type: CacheType = "auto"
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's part of a device.

    `budget_bytes` is what it may hold, `max_model_len` the context that was asked for or is its own, in tokens.
    `refusal` says why it has no room: then it has no blocks.
    """

    name: str
    share: float | None
    budget_bytes: int
    footprint: Footprint
    max_model_len: int
    block_size: int
    num_blocks: int
    refusal: NoRoom | None = None

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.footprint.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def held_bytes(self) -> int:
        return 0 if self.refusal else self.footprint.fixed_bytes + self.kv_bytes

    @property
    def served_len(self) -> int:
        """The longest context in tokens that the cache has room for."""
        if not self.footprint.kv_bytes_per_token:
            return 0 if self.refusal else self.max_model_len
        return min(self.max_model_len, self.num_tokens)

    @property
    def max_concurrency(self) -> float:
        """How many requests of that length fit the cache at once; 0 for models without one."""
        return self.num_tokens / self.served_len if self.served_len else 0.0

    def bytes_for(self, num_tokens: int) -> int:
        """What the model needs for one conversation of so many tokens."""
        return self.footprint.fixed_bytes + math.ceil(num_tokens / self.block_size) * self.block_bytes


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """All models on one device, the one that was asked for first, and what was asked."""

    device: DeviceShare
    models: tuple[ModelPlan, ...]
    wishes: tuple[Wish, ...]
    options: Options

    @property
    def held_bytes(self) -> int:
        return sum(model.held_bytes for model in self.models)

    @property
    def fits(self) -> bool:
        return not any(model.refusal for model in self.models) and self.held_bytes <= self.device.limit_bytes


def plan_device(wishes: Sequence[Wish], device: DeviceShare, options: Options) -> DevicePlan:
    """The first model beside the others: those get their shares, or what the planner gives them, it gets the rest.

    That rest is what its cache can grow to while the others need no more; with a share it is that share.
    """
    others: list[ModelPlan] = []
    tenants: list[Tenant] = []
    for wish in wishes[1:]:
        other = _other(wish, device, tenants)
        others.append(other)
        if other.refusal is None:
            tenants.append(_tenant(other, device))
    first = _first(wishes[0], device, tenants, options)
    return DevicePlan(device, (first, *others), tuple(wishes), options)


def _first(wish: Wish, device: DeviceShare, tenants: Sequence[Tenant], options: Options) -> ModelPlan:
    model = _footprint(wish.facts, device, options)
    if options.num_blocks is not None:
        block_bytes = options.block_size * model.kv_bytes_per_token
        budget = model.fixed_bytes + options.num_blocks * block_bytes
        return ModelPlan(wish.name, wish.share, budget, model, model.context, options.block_size, options.num_blocks)
    one_block = options.block_size * model.kv_bytes_per_token
    need = Need(model.fixed_bytes, one_block, device.limit_bytes, device.limit_bytes)
    return _planned(wish, model, need, device, tenants, options.block_size)


def _other(wish: Wish, device: DeviceShare, tenants: Sequence[Tenant]) -> ModelPlan:
    model = _footprint(wish.facts, device, Options())
    # Where the estimate leaves no room, the daemon would try; a plan goes by the estimate.
    need = replace(need_of(model, is_gpu=is_gpu(device.name)), certain_bytes=None)
    return _planned(wish, model, need, device, tenants, BLOCK_SIZE)


def _planned(
    wish: Wish, model: Footprint, need: Need, device: DeviceShare, tenants: Sequence[Tenant], block_size: int
) -> ModelPlan:
    found = place(
        wish.name,
        need,
        share=wish.share,
        device_wish=None,
        devices=[device],
        tenants=tenants,
        host_free_bytes=0,
        now=0.0,
    )
    if isinstance(found, NoRoom):
        return ModelPlan(wish.name, wish.share, 0, model, model.context, block_size, 0, found)
    block_bytes = block_size * model.kv_bytes_per_token
    num_blocks = (found.budget_bytes - model.fixed_bytes) // block_bytes if block_bytes else 0
    if model.context:
        num_blocks = min(num_blocks, model.num_sequences * math.ceil(model.context / block_size))
    return ModelPlan(wish.name, wish.share, found.budget_bytes, model, model.context, block_size, num_blocks)


def _footprint(facts: ModelFacts, device: DeviceShare, options: Options) -> Footprint:
    memory = DeviceMemory(device.name, device.total_bytes, 0)
    host = Host(memory, device.limit, options.quantization, options.max_model_len, options.max_num_seqs)
    found = footprint(facts, host)
    if options.cache_type == "auto" or facts.kv_bytes_per_token is None:
        return found
    elements = facts.kv_bytes_per_token // dtype_bytes(facts.dtype)
    return replace(found, kv_bytes_per_token=elements * _CACHE_TYPE_BYTES[options.cache_type])


def _tenant(plan: ModelPlan, device: DeviceShare) -> Tenant:
    """A model that is there and stays."""
    return Tenant(
        name=plan.name,
        device=device.name,
        state="awake",
        fixed_bytes=plan.footprint.fixed_bytes,
        kv_bytes=plan.kv_bytes,
        kv_used_bytes=plan.kv_bytes,
        last_used_at=0.0,
        share=plan.share,
        is_pinned=True,
        is_busy=True,
    )
