"""Tensor names of safetensors checkpoints, as the models know them.

The same weights are saved under two names: with the name of the whole model before them where a class with a head
was saved ("bert.encoder...", "model.layers..."), and without where it was saved bare.  Pure; called by
`engine.loading.safetensors_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.api.architectures import ENCODER_TYPES

_DECODER_PREFIX = "model."
_ENCODER_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Of checkpoints that were made with TensorFlow."""


def known_names(names: Collection[str], model_type: object) -> dict[str, str]:
    """Each name in the files -> the name that the model asks for; decoders' names have the prefix, encoders' not."""
    if model_type in ENCODER_TYPES:
        prefix = _ENCODER_PREFIXES[str(model_type)]
        return {name: _with_new_norm(name.removeprefix(prefix)) for name in names}
    if any(name.startswith(_DECODER_PREFIX) for name in names):
        return {name: name for name in names}
    return {name: name if name.startswith("lm_head.") else f"{_DECODER_PREFIX}{name}" for name in names}


def is_saved_bare(names: Collection[str]) -> bool:
    """Whether a decoder was saved without the class that has the head, as embedding models are."""
    return not any(name.startswith((_DECODER_PREFIX, "lm_head.")) for name in names)


def _with_new_norm(name: str) -> str:
    for old, new in _OLD_NORMS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
