"""Store and engine values → bodies of the admin routes: pure functions.

Called by `app.api.admin` and by commands that need no daemon, and so imports nothing that takes long;
what is in memory is in `app.translate.running`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from app.model_task import CAPABILITIES, Capability
from app.schema.admin import (
    InstalledModelEntry,
    ModelCardDetails,
    ModelDetails,
    ModelMemory,
    PoolingDetails,
    ProgressLine,
)
from store.presets.modelfile import Modelfile, format_modelfile
from store.presets.preset import Preset

if TYPE_CHECKING:
    from engine.api.wire import Progress
    from engine.pooling.config import ModelPooling
    from store.facts import ModelFacts
    from store.models import InstalledModel
    from store.progress import PullProgress
    from store.remote_model import RemoteModel


def model_details(facts: ModelFacts, context_length: int | None) -> ModelDetails:
    return ModelDetails(
        format=facts.format,
        family=facts.architecture,
        parameter_size=short_count(facts.num_parameters),
        quantization_level=facts.quantization,
        num_parameters=facts.num_parameters,
        context_length=context_length,
        embedding_length=facts.embedding_length,
        num_layers=facts.num_layers,
    )


def _context_length(installed: InstalledModel, facts: ModelFacts) -> int | None:
    """What the model was trained for, or less where its preset says so."""
    bound = installed.preset.parameters.context_length if installed.preset else None
    return min((length for length in (facts.context_length, bound) if length is not None), default=None)


def installed_entry(installed: InstalledModel, facts: ModelFacts | None, capability: Capability) -> InstalledModelEntry:
    return InstalledModelEntry(
        name=installed.name,
        model=installed.name,
        modified_at=rfc3339(installed.modified_at),
        size=installed.size_bytes,
        digest=installed.digest,
        source=installed.source,
        details=None if facts is None else model_details(facts, _context_length(installed, facts)),
        capabilities=(capability,),
    )


def model_card(installed: InstalledModel, facts: ModelFacts, pooling: ModelPooling | None) -> ModelCardDetails:
    """`pooling` is None for a model that writes."""
    preset = installed.preset or Preset()
    context_length = _context_length(installed, facts)
    return ModelCardDetails(
        name=installed.name,
        model=installed.name,
        path=str(installed.path),
        source=installed.source,
        digest=installed.digest,
        size=installed.size_bytes,
        modified_at=rfc3339(installed.modified_at),
        license=preset.license or installed.license or facts.license,
        has_chat_template=facts.has_chat_template or preset.template is not None,
        sampling_defaults={**installed.sampling_defaults, **preset.parameters.sampling()},
        details=model_details(facts, context_length),
        memory=_memory(facts, context_length),
        base=installed.base,
        system=preset.system,
        modelfile=format_modelfile(Modelfile(installed.base or installed.name, preset)),
        capabilities=(CAPABILITIES[pooling.task] if pooling is not None else "completion",),
        pooling=_pooling(pooling) if pooling is not None else None,
    )


def remote_card(remote: RemoteModel, capability: Capability) -> ModelCardDetails:
    """The card of a model that is not installed."""
    plan, facts = remote.plan, remote.facts
    return ModelCardDetails(
        name=plan.wanted.name,
        model=plan.wanted.name,
        path=None,
        source=plan.source,
        digest="",
        size=plan.total_bytes,
        modified_at=None,
        license=plan.license or facts.license,
        has_chat_template=facts.has_chat_template,
        sampling_defaults=plan.wanted.sampling_defaults,
        details=model_details(facts, facts.context_length),
        memory=_memory(facts, facts.context_length),
        installed=False,
        capabilities=(capability,),
    )


def _pooling(pooling: ModelPooling) -> PoolingDetails:
    return PoolingDetails(
        mode=pooling.mode,
        max_tokens=pooling.max_length,
        prompts=pooling.prompts,
        default_prompt=pooling.default_prompt,
    )


def _memory(facts: ModelFacts, context_length: int | None) -> ModelMemory:
    per_token = facts.kv_bytes_per_token
    return ModelMemory(
        weight_bytes=facts.weight_bytes,
        kv_bytes_per_token=per_token,
        has_latent_cache=facts.has_latent_cache,
        kv_bytes_full_context=per_token * context_length if per_token and context_length else None,
    )


def pull_line(progress: PullProgress) -> ProgressLine:
    # The store reports file names as a validated subclass of str, which msgspec refuses.
    file = None if progress.file is None else str(progress.file)
    return ProgressLine(
        progress.status,
        file,
        progress.total_bytes,
        progress.done_bytes,
        progress.all_total_bytes,
        progress.all_done_bytes,
    )


def load_line(progress: Progress) -> ProgressLine:
    return ProgressLine(progress.stage, None, progress.total, progress.done)


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as UTC, to the second."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def short_count(number: int) -> str:
    """134515008 → "134.5M"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)
