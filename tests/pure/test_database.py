from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from store import migrations
from store.chats.records import Message, TurnNumbers
from store.chats.tree import ChatsDb
from store.database import DatabaseThread, open_database
from store.errors import DatabaseUnusable
from store.usage_db import UsageDb

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quire.db"


def pragma(connection: sqlite3.Connection, name: str) -> object:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def schema(connection: sqlite3.Connection) -> set[str]:
    return {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}


def save_chat(connection: sqlite3.Connection, text: str = "hello") -> str:
    chats = ChatsDb(connection)
    chat = chats.create("m")
    chats.begin_turn(chat.id, [Message.of_text("user", text)], "m", {})
    return chat.id


def test_a_new_database_is_private_and_safe_against_power_cuts_and_other_processes(path: Path) -> None:
    connection = open_database(path)
    assert pragma(connection, "journal_mode") == "wal"
    assert pragma(connection, "foreign_keys") == 1
    assert pragma(connection, "synchronous") == 1
    assert pragma(connection, "busy_timeout") == 5000
    save_chat(connection)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert set(modes) == {"quire.db", "quire.db-wal", "quire.db-shm", "quire.db.lock"}
    assert set(modes.values()) == {0o600}
    connection.close()
    reopened = open_database(path, is_checked=True)
    assert len(ChatsDb(reopened).chats()) == 1
    reopened.close()


def test_an_older_database_gets_the_missing_steps_and_keeps_its_content(path: Path) -> None:
    fresh = open_database(path.with_name("fresh.db"))
    old = sqlite3.connect(path)
    migrations.migrate(old, stop_before="m002_usage")
    chat_id = save_chat(old)
    old.close()
    assert not migrations.is_up_to_date(sqlite3.connect(path))

    migrated = open_database(path)

    assert schema(migrated) == schema(fresh)
    assert ChatsDb(migrated).chat(chat_id).title == "hello"
    assert UsageDb(migrated).models() == []
    backup = sqlite3.connect(path.with_name("quire.db.backup"))
    assert migrations.applied_steps(backup) == {"m001_chats"}
    assert backup.execute("SELECT title FROM threads").fetchall() == [("hello",)]
    for connection in (fresh, migrated, backup):
        connection.close()


def test_usage_recorded_before_the_most_at_once_was_is_kept(path: Path) -> None:
    old = sqlite3.connect(path)
    migrations.migrate(old, stop_before="m003_usage_at_once")
    old.execute("INSERT INTO usage VALUES ('m', 5, 100, 20, 4096, 7.0)")
    old.commit()
    old.close()

    migrated = open_database(path)

    (usage,) = UsageDb(migrated).models()
    assert (usage.num_requests, usage.prompt_max) == (5, 100)
    assert usage.max_at_once == 0
    migrated.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = open_database(path)
    before = schema(connection)
    connection.close()
    broken = (*migrations.STEPS, ("m999", ("CREATE TABLE half (x)", "CREATE NONSENSE")))
    monkeypatch.setattr(migrations, "STEPS", broken)
    with pytest.raises(DatabaseUnusable):
        open_database(path)
    monkeypatch.undo()
    connection = open_database(path)
    assert schema(connection) == before
    connection.close()


def test_a_database_of_a_later_version_is_left_alone(path: Path) -> None:
    connection = open_database(path)
    with connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('quire', 'm900_later', '')"
        )
    connection.close()
    with pytest.raises(DatabaseUnusable, match="later version of Quire"):
        open_database(path)


@pytest.mark.parametrize("content", [b"this is no database at all" * 200, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_no_database_is_moved_aside(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    connection = open_database(path)
    save_chat(connection)
    connection.close()
    (aside,) = path.parent.glob("quire.db.broken-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text


def test_damage_inside_is_found_when_the_file_is_checked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    connection = open_database(path)
    for i in range(50):
        save_chat(connection, f"{i} " * 500)
    connection.close()
    content = bytearray(path.read_bytes())
    for offset in range(3 * 4096, len(content), 4096):
        content[offset : offset + 200] = b"\xa5" * 200
    path.write_bytes(content)
    connection = open_database(path, is_checked=True)
    assert ChatsDb(connection).chats() == []
    connection.close()
    assert "damaged" in caplog.text


def test_a_folder_that_takes_no_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseUnusable, match="QUIRE_STATE_DIR"):
        open_database(tmp_path / "file" / "quire.db")


def test_an_up_to_date_database_is_opened_without_sqlite_utils(path: Path) -> None:
    open_database(path).close()
    code = (
        "import sys; from pathlib import Path; from store.database import open_database; "
        "open_database(Path(sys.argv[1])); sys.exit('sqlite_utils' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False).returncode == 0


def test_two_processes_may_open_a_new_database_at_once(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from store.database import open_database; "
        "open_database(Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    both = [subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]


def test_readers_see_whole_turns_while_another_connection_writes(path: Path) -> None:
    """What `quire chats` does beside a daemon in the middle of an answer."""
    writer = open_database(path)
    reader = open_database(path)
    chat_id = ChatsDb(reader).create("m").id
    reader.close()
    writer.close()
    num_turns = 60
    failures: list[BaseException] = []

    def write() -> None:
        connection = open_database(path)
        chats = ChatsDb(connection)
        try:
            for i in range(num_turns):
                turn = chats.begin_turn(chat_id, [Message.of_text("user", str(i))], "m", {})
                chats.save_partial(turn, "par")
                chats.finish_turn(turn, "done", Message.of_text("assistant", f"a{i}"), TurnNumbers())
        except BaseException as error:  # noqa: BLE001  # told by the test
            failures.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    connection = open_database(path)
    chats = ChatsDb(connection)
    num_reads = 0
    while thread.is_alive():
        said = [stored.message.text for stored in chats.messages(chat_id)]
        assert len(said) in (0, 1, 2)
        if len(said) == 2:
            assert said[1] == f"a{said[0]}"
        if num_reads % 10 == 0:
            # A second writer waits for its turn and then succeeds.
            chats.rename(chat_id, f"title {num_reads}")
        num_reads += 1
    thread.join()
    assert failures == []
    assert [turn.status for turn in chats.turns(chat_id)] == ["done"] * num_turns
    connection.close()


async def test_the_thread_of_the_daemon_opens_late_works_in_order_and_tries_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    database = DatabaseThread(folder / "quire.db")
    assert not folder.exists()
    with pytest.raises(DatabaseUnusable):
        await database.run(lambda connection: save_chat(connection))
    folder.mkdir()
    chat_id = await database.run(lambda connection: save_chat(connection))
    assert await database.run(lambda connection: ChatsDb(connection).chat(chat_id).title) == "hello"
    database.close()
    assert not (folder / "quire.db-wal").exists()
