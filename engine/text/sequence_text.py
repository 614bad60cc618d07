"""`SequenceText`: the outputs of one sequence, step by step, as the text of one choice.

Joins detokenizer, stop strings, logprobs as text and token counts.  Knows nothing of the
worker that produces the outputs nor of the API that shows them.  Made by
`engine.text.stage.TextStage.stream`, driven by the daemon's streams and by `engine.llm`.
"""

from __future__ import annotations

from engine.api.output import FinishReason, OutputDelta, StepOutput, TextLogprob, TokenLogprobs, Usage
from engine.api.sampling import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer


class SequenceText:
    """One choice of a request; `push` each of its StepOutputs in order.

    Exactly one delta is terminal; it carries the held-back text and the usage, and sets
    `finished`.  A stop string can finish the choice before the worker knows, so the caller
    then aborts the sequence, and whatever the worker still sends yields empty deltas.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        index: int,
        num_prompt_tokens: int,
        continues_text: bool,
    ) -> None:
        self.index = index
        self.finished = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, continues_text=continues_text
        )
        self._stops = StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._is_plain = not sampling.stop and sampling.logprobs is None
        self._hides_stop_token = sampling.skip_special_tokens and not sampling.include_stop_str_in_output
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._num_chars = 0

    def push(self, output: StepOutput) -> OutputDelta:
        """Return what `output` adds to the choice.

        A token that ends the sequence adds no text, unless special tokens are shown or the
        stop is to be included.  A stop string ends the choice at the token that completes it,
        even where `output` goes on or is itself terminal.
        """
        if self.finished:
            return OutputDelta(index=self.index)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if self._is_plain:
            return self._delta(output, self._plain_text(output), output.token_ids, ())
        pieces: list[str] = []
        logprobs: list[TextLogprob] = []
        num_pushed = 0
        for position, token_id in enumerate(output.token_ids):
            num_pushed += 1
            self._num_completion_tokens += 1
            if self._sampling.logprobs is not None:
                logprobs.append(self._logprob(token_id, output.logprobs[position]))
            ends = output.stop_token_id is not None and num_pushed == len(output.token_ids)
            pieces.append(self._text_of(token_id, ends))
            if self._stops.matched is not None:
                break
        if output.finish_reason is not None and self._stops.matched is None:
            pieces.append(self._search(self._detokenizer.flush()))
            pieces.append(self._stops.flush())
        return self._delta(output, "".join(pieces), output.token_ids[:num_pushed], tuple(logprobs))

    def _plain_text(self, output: StepOutput) -> str:
        """All the text at once, where no stop string may end it and no token is reported by itself."""
        token_ids = output.token_ids
        self._num_completion_tokens += len(token_ids)
        if output.stop_token_id is not None and self._hides_stop_token:
            token_ids = token_ids[:-1]
        text = self._detokenizer.push_all(token_ids)
        return text if output.finish_reason is None else text + self._detokenizer.flush()

    def _text_of(self, token_id: int, ends_sequence: bool) -> str:
        if ends_sequence and self._hides_stop_token:
            return ""
        return self._search(self._detokenizer.push(token_id))

    def _search(self, text: str) -> str:
        self._num_chars += len(text)
        if self._num_completion_tokens < self._sampling.min_tokens:
            return text
        return self._stops.push(text)

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> TextLogprob:
        spell = self._tokenizer.token_text
        return TextLogprob(
            token=spell(token_id),
            token_id=token_id,
            logprob=logprobs.logprob,
            text_offset=self._num_chars,
            top=tuple(
                (spell(top_id), top_id, value)
                for top_id, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            ),
        )

    def _delta(
        self, output: StepOutput, text: str, token_ids: tuple[int, ...], logprobs: tuple[TextLogprob, ...]
    ) -> OutputDelta:
        finish_reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = None
        error_message = output.error_message
        if self._stops.matched is not None:
            finish_reason, stop_reason, error_message = "stop", self._stops.matched, None
        elif output.stop_token_id is not None and not self._is_end_of_sequence(output.stop_token_id):
            stop_reason = output.stop_token_id
        self.finished = finish_reason is not None
        return OutputDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=self.usage if self.finished else None,
            error_message=error_message,
        )

    def _is_end_of_sequence(self, token_id: int) -> bool:
        return not self._sampling.ignore_eos and token_id in self._tokenizer.eos_token_ids

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            cached_tokens=min(self._num_cached_tokens, self._num_prompt_tokens),
        )
