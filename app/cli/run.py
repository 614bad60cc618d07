"""`quire run`: one answer as plain text, or the chat in a terminal.

The plain path imports neither rich nor textual.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from app.cli.connection import open_client
from app.cli.failure import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, CommandFailure
from app.cli.output import notice, write_json, write_json_line, write_text
from app.cli.progress import follow, load_view
from app.cli.pull import OfflineOption, fetch_model
from app.cli.resume import Resume, conversation

if TYPE_CHECKING:
    from app.client import ChatFinished, EmbeddedText, QuireClient
    from app.schema.admin import ModelCardDetails
    from app.settings import Settings

Answer = TypeVar("Answer")

EMPTY_PROMPT = "The prompt is empty; write it after the model's name, or pipe it in."


def run(
    model: Annotated[str | None, typer.Argument(help="smollm2:135m, organisation/name, or a path.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to ask; without one, a chat opens in a terminal.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; default: the model's.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    continue_last: Annotated[bool, typer.Option("--continue", help="Go on with the model's last saved chat.")] = False,
    chat: Annotated[str | None, typer.Option(metavar="ID", help="Go on with this saved chat.")] = None,
    offline: OfflineOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show token counts and speed afterwards.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the answer and its numbers as JSON.")] = False,
) -> None:
    """Ask a model, or chat with it; an embedding model prints the prompt's vector.

    The model is pulled and loaded if needed.  Standard input goes before the prompt.
    """
    import asyncio

    from app.settings import load_settings
    from store.names import parse_model_name

    settings = load_settings()
    if model is None:
        raise CommandFailure(_which_model(settings), exit_code=USAGE_EXIT_CODE)
    name = parse_model_name(model).text
    resume = Resume(continue_last, chat)
    params = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    params = {key: value for key, value in params.items() if value is not None}
    opens_chat = not prompt and not json_output and _is_terminal()
    text = "" if opens_chat else _read_prompt(prompt)
    client = open_client(settings, may_ask=not json_output, is_offline=offline)
    try:
        if opens_chat:
            asyncio.run(_chat(client, name, system, params, resume))
        else:
            answer = _Answer(name, is_streamed=not json_output)
            asyncio.run(answer.ask(client, text, system, params, resume))
            answer.report(json_output=json_output, verbose=verbose)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _which_model(settings: Settings) -> str:
    """What to say to someone who named no model."""
    from app.cli.recommend import recommended_name

    largest = recommended_name(settings)
    further = (
        f", and `quire run {largest}` is the largest that fits this machine (see `quire recommend`)" if largest else ""
    )
    return f"No model was named; `quire run starter` is small enough to run anywhere{further}."


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _read_prompt(words: list[str] | None) -> str:
    """Piped text, then the words of the command line; a terminal is read only if there are no words."""
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if not words and not is_piped:
        notice("Type the prompt and end it with Ctrl+D.")
    try:
        piped = sys.stdin.read() if sys.stdin is not None and (is_piped or not words) else ""
    except UnicodeDecodeError:
        raise CommandFailure("The standard input is not text in UTF-8; pipe text in.") from None
    prompt = "\n\n".join(part for part in (piped.strip("\n"), " ".join(words or ())) if part.strip())
    if not prompt:
        raise CommandFailure(EMPTY_PROMPT, exit_code=USAGE_EXIT_CODE)
    return prompt


class _Answer:
    """One answer on its way from the daemon to stdout."""

    def __init__(self, model: str, *, is_streamed: bool) -> None:
        self._model = model
        self._is_streamed = is_streamed
        self._parts: list[str] = []
        self._finished: ChatFinished | None = None
        self._embedded: EmbeddedText | None = None

    async def ask(
        self, client: QuireClient, prompt: str, system: str | None, params: dict[str, Any], resume: Resume
    ) -> None:
        """Load the model and stream its answer; whatever ends the stream, its text ends with a line end.

        A model that does not write is asked for the prompt's vector.
        """
        from app.client import ClientError, TextDelta

        async with client:
            resumed = await resume.find(client, self._model)
            messages = conversation(resumed, system, prompt)
            chat_id = resumed.chat.id if resumed else None
            await _pull_if_missing(client, self._model, lambda: follow(client.load(self._model), load_view()))
            try:
                async for event in client.chat(messages, self._model, chat_id=chat_id, **params):
                    if isinstance(event, TextDelta):
                        self._add(event.text)
                    else:
                        self._finished = event
            except ClientError as error:
                if error.code != "wrong_task" or system is not None or params:
                    raise
                self._embedded = await client.embed(prompt, self._model)
            finally:
                if self._is_streamed and self._parts and not self._parts[-1].endswith("\n"):
                    write_text("\n")

    def _add(self, text: str) -> None:
        self._parts.append(text)
        if self._is_streamed:
            write_text(text)

    def report(self, *, json_output: bool, verbose: bool) -> None:
        """What is printed after a complete answer."""
        if self._embedded is not None:
            self._report_vector(self._embedded, json_output=json_output)
            return
        finished = self._finished
        assert finished is not None
        if json_output:
            usage = {
                "prompt_tokens": finished.prompt_tokens,
                "completion_tokens": finished.completion_tokens,
                "cached_tokens": finished.cached_tokens,
            }
            write_json(
                {
                    "model": self._model,
                    "text": "".join(self._parts),
                    "finish_reason": finished.finish_reason,
                    "usage": usage,
                    "time_to_first_token_s": finished.time_to_first_token_s,
                    "tokens_per_s": finished.tokens_per_s,
                }
            )
        if verbose:
            notice(finished.summary())

    def _report_vector(self, embedded: EmbeddedText, *, json_output: bool) -> None:
        """The vector as JSON, with `json_output` beside what else there is to know."""
        if json_output:
            usage = {"prompt_tokens": embedded.num_tokens}
            write_json({"model": self._model, "embedding": embedded.vector, "usage": usage})
        else:
            write_json_line(embedded.vector)


async def _pull_if_missing(client: QuireClient, model: str, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
    """`attempt` something that needs the model's files; if they are missing, get them and attempt it again."""
    from app.client import ClientError

    try:
        return await attempt()
    except ClientError as error:
        if error.code != "model_not_found":
            raise
        notice(f"{model} is not installed yet; pulling it.")
        await fetch_model(client, model, json_output=False)
        return await attempt()


def _require_chat(card: ModelCardDetails) -> None:
    """Refuse a chat with a model that does not write."""
    if "embedding" in card.capabilities:
        raise CommandFailure(
            f"{card.name} is an embedding model, which cannot chat; `quire run {card.name} TEXT` prints a text's "
            "vector, and programs send texts to /v1/embeddings."
        )
    if "rerank" in card.capabilities:
        raise CommandFailure(
            f"{card.name} is a reranker, which cannot chat; programs send it queries and documents at /v1/rerank."
        )


async def _chat(client: QuireClient, model: str, system: str | None, params: dict[str, Any], resume: Resume) -> None:
    """The chat; it opens at once and loads the model while the first prompt is typed."""
    async with client:
        resumed = await resume.find(client, model)
        card = await _pull_if_missing(client, model, lambda: client.show(model))
        _require_chat(card)
        from tui.app import ChatApp

        await ChatApp(client, model, system=system, params=params, resumed=resumed).run_async()
