"""A model directory that everything but an engine accepts: real tokenizer, config and weights header.

The tokenizer has one token per byte, and the chat template is the last message alone, so the
fake worker's answer is that message.  Needs no torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
CHAT_TEMPLATE = "{{ messages[-1]['content'] }}"


def write_tiny_model(
    directory: Path, *, behaviour: dict[str, Any] | None = None, weight_bytes: int | None = None
) -> Path:
    """Write the model; `behaviour` is for `tests.fakes.worker`.

    `weight_bytes` of weights are a hole in the file, and take no disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {EOS: 0} | {char: 1 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", {"eos_token": EOS, "chat_template": CHAT_TEMPLATE})
    _write_json(directory / "config.json", {"model_type": "llama", "max_position_embeddings": 512})
    num_bytes = weight_bytes or 8
    weight = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weight": weight}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)
    if behaviour is not None:
        _write_json(directory / "fake_worker.json", behaviour)
    return directory


def loads(directory: Path) -> list[tuple[int, int]]:
    """(process id, memory budget) of every fake worker that was started for this model."""
    file = directory / "loads.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(pid), int(budget)) for pid, budget in (line.split() for line in lines)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
