"""Bodies of the daemon's own routes: model management, health, version.  msgspec structs, no behaviour.

Field names are Ollama's where it has the same thing; sizes are in bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class ModelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of every route that is about one model."""

    model: str


class PullRequest(ModelRequest, frozen=True, forbid_unknown_fields=True):
    """`offline` touches no network, whatever the daemon's settings say; `limit_bytes_per_s` is of this pull alone.

    `force` downloads also what cannot run here.
    """

    limit_bytes_per_s: Annotated[int, msgspec.Meta(ge=1)] | None = None
    offline: bool = False
    force: bool = False


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Facts read from the model's files; None where they do not say."""

    format: str
    family: str
    parameter_size: str
    quantization_level: str
    num_parameters: int
    context_length: int | None = None
    embedding_length: int | None = None
    num_layers: int | None = None


class InstalledModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`details` is None for a model whose files cannot be read; `modified_at` is RFC 3339."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    source: str
    details: ModelDetails | None = None
    capabilities: tuple[str, ...] = ("completion",)


class InstalledModels(msgspec.Struct, frozen=True):
    models: tuple[InstalledModelEntry, ...]


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes: of the weights as they are stored, and of the KV cache where a model has one.

    `kv_bytes_full_context` is for one conversation that fills the context; with `has_latent_cache` a token leaves
    one compressed vector per layer instead of keys and values.
    """

    weight_bytes: int
    has_latent_cache: bool = False
    kv_bytes_per_token: int | None = None
    kv_bytes_full_context: int | None = None


class PoolingDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedding model or a reranker takes texts.

    `max_tokens` is the longest text, or pair, None where the context is the bound; `prompts` may go before texts, by
    name, and `default_prompt` names the one that does.
    """

    mode: str
    max_tokens: int | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class ModelCardDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /api/show.

    `base` is the name that the model was made from, where it was made here; `modelfile` makes it again.
    A model that is not installed has no `path` and no `modified_at`, and its `size` is that of the download.
    """

    name: str
    model: str
    path: str | None
    source: str
    digest: str
    size: int
    modified_at: str | None
    license: str | None
    has_chat_template: bool
    sampling_defaults: dict[str, Any]
    details: ModelDetails
    memory: ModelMemory
    installed: bool = True
    base: str | None = None
    system: str | None = None
    modelfile: str = ""
    capabilities: tuple[str, ...] = ("completion",)
    pooling: PoolingDetails | None = None


class DeletedModel(msgspec.Struct, frozen=True):
    freed_bytes: int


class ShutdownAnswer(msgspec.Struct, frozen=True):
    status: str = "stopping"


class ProgressLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a streamed answer; the last one has the status "success".

    Lines of several files interleave; the `all_` counts, in bytes, are of all files of a download.
    """

    status: str
    file: str | None = None
    total: int = 0
    completed: int = 0
    all_total: int = 0
    all_completed: int = 0


class HealthModel(msgspec.Struct, frozen=True):
    """`state` as `app.schema.residency` has it: ready, loading, asleep, ..."""

    name: str
    state: str


class Health(msgspec.Struct, frozen=True):
    models: tuple[HealthModel, ...]
    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str
