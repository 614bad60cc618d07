"""`recommend`: which models of the catalogue fit a device, the best first, and what each of them needs.

Pure arithmetic on the catalogue's figures; the worker itself knows the true ones after loading.  Called by
`quire recommend`, and by `quire run` without a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from app.residency.advice.acceptance import why_unsupported
from app.residency.arithmetic.footprint import Host, footprint
from store.catalog import CatalogModel
from store.catalog_facts import catalog_facts

Purpose = Literal["chat", "code", "reasoning", "embed", "rerank"]

CONTEXT_TOKENS = 8192
"""A conversation that a recommended model has room for, prompt and answer."""

FEW_SEQUENCES = 16
"""`max_num_seqs` of a machine that one person uses."""

_CPU_WEIGHTS_SHARE = 0.36
"""Of RAM.  Each token reads all weights, and a person's other programs need memory too; gives the sizes that
are usual for 8, 16 and 24 GiB."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a model takes on a device; `cache_bytes` is for one conversation of `context` tokens."""

    model: CatalogModel
    weight_bytes: int
    cache_bytes: int
    working_bytes: int
    context: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.working_bytes


def recommend(
    models: Iterable[CatalogModel], host: Host, purpose: Purpose, max_num_seqs: int | None = None
) -> list[Need]:
    """The models for a purpose that run and fit, the best first.

    The best is the largest; of one size that which needs no login, then the newest.
    """
    fitting = (
        need_of(model, host, max_num_seqs) for model in suited(models, host, purpose) if why_not_run(model) is None
    )
    return sorted((need for need in fitting if fits(need, host)), key=_merit, reverse=True)


def suited(models: Iterable[CatalogModel], host: Host, purpose: Purpose) -> list[CatalogModel]:
    """The models for a purpose in the form that suits the device, whether they run and fit or not.

    On the CPU a quantised variant takes the place of the original, since it is smaller and faster; a GPU has
    every weight in half precision, so there it would only lose.  Models with a short context are left out.
    """
    listed = [model for model in models if model.kind == purpose]
    if host.is_gpu:
        listed = [model for model in listed if model.variant_of is None]
    else:
        replaced = {model.variant_of for model in listed}
        listed = [model for model in listed if model.name not in replaced]
    if purpose in ("embed", "rerank"):
        return listed
    return [model for model in listed if model.context_length >= CONTEXT_TOKENS]


def need_of(model: CatalogModel, host: Host, max_num_seqs: int | None = None) -> Need:
    """What the model takes on the device, with the context that is stated or its own, if that is shorter."""
    wanted = footprint(catalog_facts(model), replace(host, max_num_seqs=max_num_seqs or host.max_num_seqs))
    context = min(CONTEXT_TOKENS, wanted.context)
    return Need(
        model=model,
        weight_bytes=wanted.weight_bytes,
        cache_bytes=wanted.kv_bytes(context),
        working_bytes=wanted.workspace.total_bytes,
        context=context,
    )


def fits(need: Need, host: Host) -> bool:
    """Whether the device has room for the model when nothing else is on it."""
    if not host.is_gpu and need.weight_bytes > host.memory.total_bytes * _CPU_WEIGHTS_SHARE:
        return False
    return need.total_bytes <= host.usable_bytes


def why_not_run(model: CatalogModel) -> str | None:
    """Why this version does not run a model of the catalogue, or None."""
    return why_unsupported(catalog_facts(model))


def _merit(need: Need) -> tuple[float, bool, str, str]:
    billions = need.model.parameters / 1e9
    size_class = round(billions) if billions >= 1 else round(billions, 1)
    return (size_class, not need.model.gated, need.model.released, need.model.name)
