"""sentence-transformers, as one contender's child process.

    python -m benchmarks.embedders.sentence_child     (commands on stdin: see `benchmarks.llamacpp.serving`)

Its own `encode` with its own defaults: batches of 32 texts in order of their lengths, padded.  The package may lie in
a folder of its own, which is looked into after all others.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.embedders.answer import Answer
from benchmarks.llamacpp.serving import serve, usage


class Contender:
    """The commands of this child; `load` comes first."""

    def load(self, model: str, threads: int, folder: str | None) -> dict[str, Any]:
        if folder is not None:
            sys.path.append(folder)
        import torch
        from sentence_transformers import SentenceTransformer, __version__

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(model, device="cpu")
        return {"dtype": str(next(self._model.parameters()).dtype).removeprefix("torch."), "version": __version__}

    def embed(self, texts: list[str]) -> dict[str, Any]:
        started = time.perf_counter()
        vectors = self._model.encode(texts, show_progress_bar=False)
        seconds = time.perf_counter() - started
        limit = self._model.max_seq_length
        encoded = self._model.tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
        return Answer.of(vectors, seconds, sum(map(len, encoded))).to_json()


if __name__ == "__main__":
    contender = Contender()
    serve({"load": contender.load, "embed": contender.embed, "usage": lambda: usage(0)})
