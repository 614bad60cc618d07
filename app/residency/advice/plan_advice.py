"""Sentences to a plan: how its figures come about, what it leaves out, and what to change where it does not fit.

Pure; called by `quire plan`, for a person and in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from app.residency.advice.acceptance import why_unsupported
from app.residency.advice.plan import DevicePlan, Wish, plan_device
from app.residency.arithmetic.demand import need_of
from app.residency.arithmetic.memory import is_gpu
from app.residency.arithmetic.tenants import NoRoom
from store.facts import ModelFacts
from store.shape import dtype_bytes
from store.space import format_bytes

_FEW_SEQUENCES = 16
_GPU_SIZES_GIB = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)
_MACHINE_SIZES_GIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
_ROUNDING = 1e-9
"""0.6 + 0.32 is a little more than 0.92 in binary, and yet fits."""
_PLANNED_ONLY = ("fp8", "int8")


def per_token_text(facts: ModelFacts, kv_bytes_per_token: int) -> str:
    """`28,672 bytes = 2 (keys and values) x 28 layers x 2 KV heads x 128 x 2 bytes`."""
    text = f"{kv_bytes_per_token:,} bytes"
    elements = (facts.kv_bytes_per_token or 0) // dtype_bytes(facts.dtype)
    layers, heads, width = facts.num_layers, facts.num_kv_heads, facts.head_dim
    if not elements or not layers:
        return text
    each = f"{kv_bytes_per_token // elements} byte{'s' if kv_bytes_per_token > elements else ''}"
    if facts.has_latent_cache:
        return f"{text} = {layers} layers x {elements // layers} numbers (one latent vector) x {each}"
    if heads and width and elements == 2 * layers * heads * width:
        return f"{text} = 2 (keys and values) x {layers} layers x {heads} KV heads x {width} x {each}"
    return text


def notes(plan: DevicePlan, *, is_estimate: bool) -> list[str]:
    """What to know of the figures of the first model; `is_estimate`: its weights were counted by its config alone."""
    first, facts, cache_type = plan.models[0], plan.wishes[0].facts, plan.options.cache_type
    found = []
    if facts.has_latent_cache:
        found.append(_latent_note(facts, first.footprint.kv_bytes_per_token))
    if reason := why_unsupported(facts):
        found.append(f"This version does not run it.  {reason}")
    if cache_type in _PLANNED_ONLY:
        found.append(f"The engine does not keep a KV cache in {cache_type} yet; this is what it would take.")
    elif not is_gpu(plan.device.name) and cache_type == "auto" and first.footprint.kv_bytes_per_token:
        found.append(_cpu_cache_note(facts, first.footprint.kv_bytes_per_token))
    if is_estimate:
        found.append("No weights were read: their number follows from config.json.")
    if first.share is None and not first.refusal and first.num_blocks:
        found.append(_start_note(plan))
    return [note for note in found if note]


def changes(plan: DevicePlan) -> list[str]:
    """What would let the first model fit, or serve its whole context, the least change first."""
    first, device = plan.models[0], plan.device
    shares = sum(model.share or 0 for model in plan.models)
    if len(plan.models) > 1 and shares > device.limit + _ROUNDING:
        return [_shares_too_large(plan, shares)]
    if any(other.refusal for other in plan.models[1:]):
        return [other.refusal.sentence for other in plan.models[1:] if other.refusal]
    if plan.held_bytes > device.limit_bytes:
        return [
            f"So many blocks need {format_bytes(plan.held_bytes)} and models may have "
            f"{format_bytes(device.limit_bytes)}; plan fewer blocks, or more memory."
        ]
    if first.refusal is None:
        return _for_the_whole_context(plan)
    found = [_why_no_room(plan, first.refusal)]
    if first.footprint.num_sequences > _FEW_SEQUENCES and _fits(plan.wishes, plan, max_num_seqs=_FEW_SEQUENCES):
        found.append(f"With `--max-num-seqs {_FEW_SEQUENCES}`, enough for one person, it fits.")
    if len(plan.wishes) > 1 and _fits(plan.wishes[:1], plan):
        found.append("Without the other models it fits.")
    return [*found, _smallest_device(plan, lambda tried: tried.fits, "it")]


def _shares_too_large(plan: DevicePlan, shares: float) -> str:
    first, limit = plan.models[0], plan.device.limit
    left = math.floor(100 * (limit - shares + (first.share or 0)) + _ROUNDING) / 100
    what_to_do = f"give {first.name} at most {left:g}" if first.share and left > 0 else "lower some of them"
    return f"The shares come to {shares:.4g}, above the {limit:g} that models may have; {what_to_do}."


def _why_no_room(plan: DevicePlan, refusal: NoRoom) -> str:
    first, device = plan.models[0], plan.device
    others = sum(tenant.held_bytes for tenant in plan.models[1:])
    needed = first.bytes_for(1) if first.share is None else device.share_bytes(first.share)
    if not others or needed < first.bytes_for(1) or needed > device.limit_bytes:
        return refusal.sentence
    left = needed - refusal.short_bytes
    of_share = "" if first.share is None else f" (its share of {first.share:g})"
    why = f"{first.name} needs {format_bytes(needed)}{of_share} and the other models leave {format_bytes(max(0, left))}"
    return f"{why}; there is room for a share of {device.share_within(max(0, left)):g}."


def _for_the_whole_context(plan: DevicePlan) -> list[str]:
    first, device = plan.models[0], plan.device
    if first.served_len >= first.max_model_len:
        return []
    found = [
        f"The whole context of {first.max_model_len:,} tokens does not fit: it will be {first.served_len:,}; "
        f"`--max-model-len {first.served_len}` says so from the start."
    ]
    share = device.share_of(first.bytes_for(first.max_model_len))
    if first.share is not None and share + sum(other.share or 0 for other in plan.models[1:]) <= device.limit:
        found.append(f"A share of {share:g} is enough for the whole context.")
    else:
        whole = first.max_model_len
        found.append(_smallest_device(plan, lambda tried: tried.models[0].served_len >= whole, "the whole context"))
    return found


def _smallest_device(plan: DevicePlan, is_enough: Callable[[DevicePlan], bool], what: str) -> str:
    """The first usual size of memory that is enough for the same models."""
    kind, sizes = ("GPU", _GPU_SIZES_GIB) if is_gpu(plan.device.name) else ("machine", _MACHINE_SIZES_GIB)
    for size in sizes:
        device = replace(plan.device, total_bytes=size * 2**30)
        if device.total_bytes > plan.device.total_bytes and is_enough(plan_device(plan.wishes, device, plan.options)):
            return f"A {kind} of {size} GiB would hold {what}."
    return f"No {kind} of up to {sizes[-1]} GiB would hold {what}."


def _fits(wishes: Sequence[Wish], plan: DevicePlan, **changed: Any) -> bool:
    return plan_device(wishes, plan.device, replace(plan.options, **changed)).fits


def _latent_note(facts: ModelFacts, per_token: int) -> str:
    note = "It caches one compressed vector per layer and token (MLA), not keys and values of every head"
    elements = (facts.kv_bytes_per_token or 0) // dtype_bytes(facts.dtype)
    if elements and facts.num_layers and facts.num_heads and facts.head_dim:
        naive = 2 * facts.num_layers * facts.num_heads * facts.head_dim * per_token // elements
        note += f": the usual sum over heads, {naive:,} bytes a token, is {naive / per_token:.0f} times too much"
    return note + "."


def _cpu_cache_note(facts: ModelFacts, per_token: int) -> str:
    """Where the cache in RAM is not of the type that the model's config says."""
    stated = facts.kv_bytes_per_token
    if not stated or stated == per_token:
        return ""
    return f"In RAM the cache is float32; in the model's own {facts.dtype or 'half precision'} it is {stated:,} bytes."


def _start_note(plan: DevicePlan) -> str:
    """That a model without a share does not begin with all that it may have."""
    first = plan.models[0]
    need = need_of(first.footprint, is_gpu=is_gpu(plan.device.name))
    if need.wanted_kv_bytes >= first.kv_bytes:
        return ""
    return (
        f"Without a share it begins with a KV cache of {format_bytes(need.wanted_kv_bytes)} or what recorded requests "
        "need, and grows as its requests need more."
    )
