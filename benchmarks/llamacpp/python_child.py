"""llama.cpp through the `llama-cpp-python` package's low-level API, as one contender's child process.

    python -m benchmarks.llamacpp.python_child        (commands on stdin: see `serving`)

llama.cpp is given its best: one context for each number of sequences, with a cache of its own for each
sequence (quicker than a shared one where prompts differ), flash attention where it chooses it, logits only
of the rows that are sampled, and the quicker of its own greedy sampler and numpy's argmax.  The KV cache has
its default type, float16.  "Loaded" means what it means for llama.cpp's own programs and for Quire: model
and contexts are there and first tokens have been computed.
"""

from __future__ import annotations

import ctypes
import re
import time
from typing import Any

from benchmarks.llamacpp.serving import serve, usage

BATCH_TOKENS = 2048
UBATCH_TOKENS = 512
WARM_UP_TOKENS = 17
"""As many as Quire computes before it calls itself ready."""
_KV_SIZE = re.compile(r"KV buffer size\s*=\s*([\d.]+) MiB")


class Context:
    """One `llama_context` for up to `num_sequences` sequences of `length` tokens, with its batch and sampler."""

    def __init__(self, library: Any, model: Any, num_sequences: int, length: int, threads: int) -> None:
        self._library = library
        params = library.llama_context_default_params()
        params.n_ctx = num_sequences * (-(-length // 256) * 256)
        params.n_batch, params.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        params.n_seq_max = params.n_outputs_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {num_sequences} x {length} tokens")
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._batch = library.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._greedy = library.llama_sampler_init_greedy()
        self.samples_natively = False

    def choose_sampler(self) -> None:
        """Keep the quicker way of sampling, tried on the logits of the last step."""
        took = {}
        for native in (True, False):
            self.samples_natively = native
            attempts = []
            for _ in range(9):
                started = time.perf_counter()
                self._sample([0])
                attempts.append(time.perf_counter() - started)
            took[native] = min(attempts)
        self.samples_natively = took[True] < took[False]

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Seconds from the start to each token of each sequence; all decode together once all prompts are done."""
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), False)
        arrivals: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()
        tokens = self._prompts(prompts, arrivals, started)
        for step in range(max_tokens - 1):
            for sequence, token in enumerate(tokens):
                self._put(sequence, sequence, token, len(prompts[sequence]) + step, samples=True)
            self._decode(len(tokens))
            tokens = self._sample(list(range(len(tokens))))
            now = time.perf_counter() - started
            for times in arrivals:
                times.append(now)
        return arrivals

    def _prompts(self, prompts: list[list[int]], arrivals: list[list[float]], started: float) -> list[int]:
        """Compute the prompts, as many at once as a batch holds; returns the first token of each."""
        firsts: list[int] = []
        filled, sampled = 0, []
        last_sequence = len(prompts) - 1
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                ends = position == len(prompt) - 1
                self._put(filled, sequence, token, position, samples=ends)
                sampled += [filled] if ends else []
                filled += 1
                if filled == BATCH_TOKENS or (ends and sequence == last_sequence):
                    self._decode(filled)
                    firsts += self._sample(sampled)
                    now = time.perf_counter() - started
                    for done in range(len(firsts) - len(sampled), len(firsts)):
                        arrivals[done].append(now)
                    filled, sampled = 0, []
        return firsts

    def _put(self, index: int, sequence: int, token: int, position: int, *, samples: bool) -> None:
        batch = self._batch
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = samples

    def _decode(self, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        if status := self._library.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode failed with {status}")

    def _sample(self, indices: list[int]) -> list[int]:
        """The likeliest token at each of these places of the batch, which are all that have logits."""
        library, context = self._library, self._context
        if self.samples_natively:
            return [library.llama_sampler_sample(self._greedy, context, index) for index in indices]
        import numpy as np

        logits = library.llama_get_logits(context)
        address = ctypes.addressof(logits.contents)
        rows = (ctypes.c_float * (len(indices) * self._vocab_size)).from_address(address)
        return np.frombuffer(rows, np.float32).reshape(len(indices), self._vocab_size).argmax(1).tolist()  # type: ignore[no-any-return]


class Contender:
    """The commands of this child; `load` comes first."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._kv_mib: list[float] = []

    def load(self, model: str, threads: int, shapes: list[list[int]], **_: Any) -> dict[str, Any]:
        """Load the model, with a context for each [number of sequences, tokens of each]."""
        started = time.perf_counter()
        import llama_cpp
        import numpy  # noqa: F401  Counted as an import, not as loading.

        imported = time.perf_counter()
        # Kept: llama.cpp calls it as long as the process lives.
        self._log = llama_cpp.llama_log_callback(self._note)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        handle = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not handle:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        for num_sequences, length in shapes:
            self._contexts[num_sequences] = Context(llama_cpp, handle, num_sequences, length, threads)
        constructed = time.perf_counter()
        self._contexts[shapes[0][0]].run([[1] * WARM_UP_TOKENS], 2)
        ready = time.perf_counter()
        for num_sequences, context in self._contexts.items():
            context.run([[2] * 4] * num_sequences, 2)
            context.choose_sampler()
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(handle))
        sampling = {n: "native" if c.samples_natively else "argmax" for n, c in self._contexts.items()}
        return {
            "import_s": imported - started,
            "construct_s": constructed - imported,
            "load_s": ready - imported,
            "vocab_size": vocab_size,
            "details": {
                "version": llama_cpp.__version__,
                "system": llama_cpp.llama_print_system_info().decode().strip(),
                "sampling": sampling,
            },
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Arrival times of every token, in seconds from the start of the run."""
        smallest = min(num_sequences for num_sequences in self._contexts if num_sequences >= len(prompts))
        return self._contexts[smallest].run(prompts, max_tokens)

    def usage(self) -> dict[str, float]:
        """llama.cpp clears its caches when it makes them, so all of their bytes are resident."""
        if not self._kv_mib:
            raise RuntimeError("llama.cpp did not say how large its KV cache is")
        return usage(round(sum(self._kv_mib) * 2**20))

    def _note(self, level: int, text: bytes, data: Any) -> None:
        self._kv_mib += [float(found) for found in _KV_SIZE.findall(text.decode(errors="replace"))]


if __name__ == "__main__":
    contender = Contender()
    serve({"load": contender.load, "run": contender.run, "usage": contender.usage})
