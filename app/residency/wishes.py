"""`Wishes`: how somebody wants a model to be kept, whether it is in memory at this moment or not.

They begin as what the settings say, `quire load`, `quire share` and the like change them, and they last until the
model is stopped.  Read by `app.residency.slot` and whatever places a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.residency_settings import ResidentSettings
from app.settings import Settings


@dataclass(slots=True)
class Wishes:
    """`share` is a fraction of the device's memory, None: as much as its traffic needs.

    `keep_alive_s` is for how long it stays after its last request, `math.inf` for ever.  A pinned model leaves only
    at somebody's wish.  `device` is "auto" or a device; `max_model_len` is None where the settings of all models hold.
    """

    share: float | None
    keep_alive_s: float
    device: str
    is_pinned: bool = False
    max_model_len: int | None = None

    @classmethod
    def of_settings(cls, settings: Settings, resident: ResidentSettings | None) -> Wishes:
        """What `resident` says of a model, and what holds for all where it says nothing."""
        usual = cls(share=settings.gpu_memory_utilization, keep_alive_s=settings.keep_alive, device=settings.device)
        if resident is None:
            return usual
        return cls(
            share=usual.share if resident.share is None else resident.share,
            keep_alive_s=usual.keep_alive_s if resident.keep_alive is None else resident.keep_alive,
            device=resident.device or usual.device,
            is_pinned=resident.pin,
            max_model_len=resident.max_model_len,
        )
