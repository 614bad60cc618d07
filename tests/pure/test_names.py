"""Names from outside: what is accepted, what is refused, and that nothing accepted can leave a directory."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import InvalidName
from store.names import CommitId, Digest, RepoFile, RepoId, Revision, parse_model_name

PIECES = [*'abcAZ019._-/\\:@~ %*?"<>|', "\0", "\n", "..", "../", "con", "NUL", "aux.", "COM1", "é", "🦙", "--"]
HOSTILE = st.lists(st.sampled_from(PIECES)).map("".join) | st.text()
DEVICES = {"con", "prn", "aux", "nul", "com1"}


@pytest.mark.parametrize(
    ("text", "kind", "canonical"),
    [
        ("starter", "alias", "smollm2:135m"),
        ("Starter", "alias", "smollm2:135m"),
        ("SmolLM2:135M", "alias", "smollm2:135m"),
        ("unheard-of:1b", "alias", "unheard-of:1b"),
        ("tinyllama:latest", "alias", "tinyllama"),
        ("org/repo", "repo", "org/repo"),
        ("org/repo@main", "repo", "org/repo@main"),
        ("org/repo@refs/pr/1", "repo", "org/repo@refs/pr/1"),
        ("hf.co/org/repo:Q4_K_M", "repo", "org/repo:Q4_K_M"),
        ("https://huggingface.co/org/repo", "repo", "org/repo"),
        ("org/repo:q4_k_m", "repo", "org/repo:Q4_K_M"),
        ("org/repo@v1:sub/model.gguf", "repo", "org/repo@v1:sub/model.gguf"),
        ("ms:org/repo", "repo", "ms:org/repo"),
        ("MS:Org/repo@v1:q8_0", "repo", "ms:Org/repo@v1:Q8_0"),
        ("ms:org/repo:a/b.gguf", "repo", "ms:org/repo:a/b.gguf"),
        ("pypi:package", "repo", "pypi:package"),
        ("PyPI:Some_Package.name==1.0.post1", "repo", "pypi:some-package-name==1.0.post1"),
    ],
)
def test_accepted_names_have_one_canonical_form(text: str, kind: str, canonical: str) -> None:
    name = parse_model_name(text)
    assert (name.kind, name.text) == (kind, canonical)
    assert parse_model_name(name.text) == name


def test_hub_name_is_taken_apart() -> None:
    name = parse_model_name("hf.co/org/repo@abc:Q8_0")
    assert (name.repo, name.revision, name.quantization, name.file) == ("org/repo", "abc", "Q8_0", None)


def test_paths_are_told_from_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    assert parse_model_name("org/model").kind == "repo"
    (tmp_path / "org/model/config.json").write_text("{}")
    assert parse_model_name("org/model").path == tmp_path / "org/model"
    assert parse_model_name("./anything").path == tmp_path / "anything"
    assert parse_model_name("weights.GGUF").path == tmp_path / "weights.GGUF"
    assert parse_model_name("~/model").path == Path.home() / "model"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", " starter", "a b", "org/", "/", "org/repo/file", "org/..", "org/.hidden", "-org/repo", "org/re--po",
        "org/repo@", "org/repo@../x", "org/repo@a//b", "org/repo@a\\b", "org/repo:", "org/repo:Q4 K", "org/con",
        "org/repo:../x.gguf", "org/repo:/x.gguf", "org/repo:a\\b.gguf", "org/repo:nul.gguf", "org/repo:a/aux/b.gguf",
        "hf.co/../../etc:x", "hf.co/org", "a\0b", "./a\0b", "org/repo\n", "a" * 600, "o/" + "r" * 600, "alias:",
        "org/repo:" + "x" * 300 + ".gguf", "./" + "x" * 5000, "ms:org", "ms:../x", "ms:ms:org/repo", "ms:org/../x",
        "ms:org/con", "ms:", "pypi:", "pypi:../x", "pypi:a/b", "pypi:-x", "pypi:a b", "pypi:nul", "pypi:a==",
        "pypi:a==../x", "pypi:a==1/2", "pypi:pypi:a", "pypi:a[extra]", "pypi:a>=1", "pypi:a @ file:///etc",
        "pypi:--index-url=x",
    ],
)  # fmt: skip
def test_refused_names(text: str) -> None:
    if text == "/":  # the file system's root is a path, though no model
        assert parse_model_name(text).kind == "path"
        return
    with pytest.raises(InvalidName) as caught:
        parse_model_name(text)
    assert len(caught.value.message) < 400
    assert caught.value.message.isprintable()


@given(HOSTILE)
def test_a_repository_file_never_leaves_its_snapshot(text: str) -> None:
    try:
        file = RepoFile(text)
    except InvalidName:
        return
    base = Path("/data/hub/snapshot")
    assert (base / file).resolve().is_relative_to(base)
    assert base / file != base
    windows = PureWindowsPath("C:/data") / file
    assert windows.drive == "C:"
    assert ".." not in windows.parts
    assert not any(part.split(".")[0].rstrip().lower() in DEVICES for part in windows.parts)
    assert all(len(part.encode()) <= 255 for part in file.split("/"))


SAFE_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+/")


@given(HOSTILE, st.sampled_from(["", "ms:", "pypi:", "org/", "ms:org/"]))
def test_a_repository_is_one_safe_folder_of_its_own(text: str, prefix: str) -> None:
    try:
        repo = RepoId(prefix + text)
    except InvalidName:
        return
    assert set(repo.folder) <= SAFE_CHARACTERS - {"/"}
    assert set(repo.path) <= SAFE_CHARACTERS
    assert ".." not in repo
    assert repo.folder.startswith(("models--", "modelscope--models--", "pypi--"))
    assert not repo.path.startswith(("-", "/", "."))
    assert RepoId(repo) == repo


@given(HOSTILE)
def test_a_revision_is_a_safe_relative_path(text: str) -> None:
    try:
        revision = Revision(text)
    except InvalidName:
        return
    assert Path("/data", revision).resolve().is_relative_to("/data")
    assert set(revision) <= SAFE_CHARACTERS
    assert ".." not in revision


@given(HOSTILE, st.sampled_from(["", "ms:", "pypi:", "ms:org/repo@", "pypi:package==", "hf.co/org/repo:"]))
def test_parsing_gives_a_name_or_one_clear_refusal(text: str, prefix: str) -> None:
    try:
        name = parse_model_name(prefix + text)
    except InvalidName:
        return
    assert name.kind == "path" or name.text.isprintable()


@pytest.mark.parametrize("text", ["", "0" * 39, "0" * 41, "0" * 63, "../" * 20, "A" * 64, "g" * 64, "0" * 64 + "\n"])
def test_refused_digests(text: str) -> None:
    with pytest.raises(InvalidName):
        Digest(text)
    with pytest.raises(InvalidName):
        CommitId(text)


def test_repository_folder_is_the_one_of_the_hugging_face_cache() -> None:
    assert RepoId("Qwen/Qwen3-0.6B").folder == "models--Qwen--Qwen3-0.6B"


def test_repositories_of_one_name_on_several_services_stay_apart() -> None:
    repos = [RepoId("org/repo"), RepoId("ms:org/repo"), RepoId("pypi:org-repo")]
    assert [repo.registry for repo in repos] == ["hub", "modelscope", "pypi"]
    assert [repo.path for repo in repos] == ["org/repo", "org/repo", "org-repo"]
    assert [repo.folder for repo in repos] == [
        "models--org--repo", "modelscope--models--org--repo", "pypi--org-repo",
    ]  # fmt: skip
