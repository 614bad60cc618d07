"""Where tokens of hubs lie, and who may read them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from store.errors import DataRootUnusable
from store.hub_token import (
    forget_hub_token,
    forget_mirror_token,
    mirror_tokens,
    store_hub_token,
    store_mirror_token,
    stored_token,
)


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    environ = {"HF_TOKEN_PATH": str(tmp_path / "deep/token")}
    assert stored_token(environ) is None
    assert store_hub_token("hf_kept", environ) == tmp_path / "deep/token"
    assert stored_token(environ) == "hf_kept"
    assert stored_token(environ | {"HF_TOKEN": " hf_given "}) == "hf_given"
    assert forget_hub_token(environ)
    assert not forget_hub_token(environ)


def test_a_token_that_others_could_read_is_replaced_by_one_they_cannot(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    store_hub_token("new", {"HF_TOKEN_PATH": str(path)})
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_tokens_of_mirrors_stay_apart(tmp_path: Path) -> None:
    store_mirror_token(tmp_path, "https://a.test", "1")
    store_mirror_token(tmp_path, "https://b.test", "2")
    assert mirror_tokens(tmp_path) == {"https://a.test": "1", "https://b.test": "2"}
    assert forget_mirror_token(tmp_path, "https://a.test")
    assert not forget_mirror_token(tmp_path, "https://a.test")
    assert mirror_tokens(tmp_path) == {"https://b.test": "2"}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b"\xff"])
def test_a_spoilt_file_counts_as_no_tokens(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hub_tokens.json").write_bytes(content)
    assert mirror_tokens(tmp_path) == {}


def test_a_token_that_cannot_be_kept_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataRootUnusable, match="cannot be changed"):
        store_hub_token("x", {"HF_TOKEN_PATH": str(tmp_path / "file/token")})
