"""`quire chats`: list, search, show, rename, delete, export and import saved chats.  None of them starts a daemon."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from app.cli.output import format_age, notice, write_json, write_table, write_text
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.cli.records import ChatRecords
    from app.schema.chats import ChatDetails, ChatEntry

T = TypeVar("T")

ChatArgument = Annotated[str, typer.Argument(metavar="ID", help="As `quire chats` shows it; its beginning will do.")]

_SPEAKERS = {"user": "You", "system": "System", "tool": "Tool"}

chats = typer.Typer(
    help="Show, search and delete saved chats.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)


@chats.callback()
def list_chats(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most so many.")] = 30,
    json_output: JsonOption = False,
) -> None:
    """Show the saved chats, the latest first.

    `quire run MODEL --chat ID` goes on with one.
    """
    if context.invoked_subcommand is not None:
        return
    entries = _ask(lambda records: records.list(limit=limit))
    if json_output:
        write_json({"chats": entries})
        return
    write_table(("ID", "TITLE", "MODEL", "CHANGED"), [_row(entry) for entry in entries])
    if not entries:
        notice("No chat is saved; `quire run MODEL` begins one.")


@chats.command("search")
def search(
    words: Annotated[list[str], typer.Argument(help='All must occur; "quotes" keep words together.')],
    json_output: JsonOption = False,
) -> None:
    """Find chats by what was said in them."""
    # The shell took the quotes that kept words together.
    query = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    hits = _ask(lambda records: records.search(query))
    if json_output:
        write_json({"hits": hits})
        return
    if not hits:
        notice(f"No chat has {' '.join(words)}; `quire chats` lists all.")
        return
    write_table(
        ("ID", "TITLE", "FOUND"), [(hit.chat.id, _printable(hit.chat.title), _printable(hit.snippet)) for hit in hits]
    )


@chats.command("show")
def show(chat_id: ChatArgument, json_output: JsonOption = False) -> None:
    """Print a chat."""
    details = _ask(lambda records: records.get(chat_id))
    if json_output:
        write_json(details)
        return
    write_text(_transcript(details))


@chats.command("rename")
def rename(chat_id: ChatArgument, title: Annotated[str, typer.Argument(help="The new title.")]) -> None:
    """Give a chat another title."""
    renamed = _ask(lambda records: records.rename(chat_id, title))
    notice(f"{renamed.id} is now called {renamed.title!r}.")


@chats.command("rm")
def remove(
    chat_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The chats to delete.")],
) -> None:
    """Delete chats."""

    async def delete_each(records: ChatRecords) -> bool:
        from app.client import ClientError
        from store.errors import StoreError

        is_complete = True
        for chat_id in chat_ids:
            try:
                deleted = await records.delete(chat_id)
            except (ClientError, StoreError) as error:
                notice(error.message)
                is_complete = False
            else:
                notice(f"Deleted {deleted.id} ({deleted.title}).")
        return is_complete

    if not _ask(delete_each):
        raise typer.Exit(1)


@chats.command("export")
def export(
    chat_id: ChatArgument,
    file_format: Annotated[Literal["markdown", "jsonl"], typer.Option("--format", help="What to write.")] = "markdown",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file, instead of standard output.")] = None,
) -> None:
    """Write a chat as Markdown or as lines of JSON."""
    text = _ask(lambda records: records.export(chat_id, file_format))
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
        notice(f"Written to {output}.")


@chats.command("import")
def import_chats(
    file: Annotated[
        Path, typer.Argument(help="conversations.json of a ChatGPT export, or `quire chats export`'s jsonl.")
    ],
) -> None:
    """Save the chats of a file; those that are saved already stay as they are."""
    from app.translate.chats import import_body
    from store.chats.imports import read_chats

    imported = read_chats(file)

    async def add_each(records: ChatRecords) -> int:
        answers = [await records.add(import_body(chat)) for chat in imported]
        return sum(answer.is_new for answer in answers)

    num_new = _ask(add_each)
    notice(f"{num_new:,} chats saved; {len(imported) - num_new:,} were there already.")


def _ask(question: Callable[[ChatRecords], Awaitable[T]]) -> T:
    """The answer to `question` from wherever the chats are."""
    import asyncio

    from app.cli.records import open_records
    from app.settings import load_settings

    async def ask() -> T:
        async with open_records(load_settings()) as records:
            return await question(records.chats)

    return asyncio.run(ask())


def _row(entry: ChatEntry) -> tuple[str, ...]:
    return entry.id, _printable(entry.title), entry.model, format_age(entry.updated_at)


def _transcript(details: ChatDetails) -> str:
    """The conversation as text: who speaks, what is said, and why an answer ended early."""
    answers = {turn.message: turn for turn in details.turns if turn.message}
    blocks = []
    for message in details.messages:
        turn = answers.get(message.hash)
        speaker = _SPEAKERS.get(message.role) or _short_revision(turn.model if turn else details.chat.model)
        ending = f"\n({turn.status} before its end)" if turn and turn.status != "done" else ""
        blocks.append(f"{speaker}:\n{message.content}{ending}\n")
    running = [turn.partial for turn in details.turns if turn.status == "streaming" and turn.parent == details.chat.tip]
    blocks += [f"{details.chat.model} (still answering):\n{partial}\n" for partial in running]
    return "\n".join(blocks)


def _short_revision(model: str) -> str:
    """`org/name@0123abcd...` with a commit that a person can read."""
    name, at, commit = model.partition("@")
    return f"{name}{at}{commit[:8]}" if len(commit) == 40 else model


def _printable(text: str) -> str:
    """One line without anything that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
