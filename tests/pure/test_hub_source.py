"""Probing a hub and listing a repository through the real client library."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from store.errors import AccessDenied, HubUnreachable, ModelNotFound
from store.hub_settings import HubSettings
from store.names import RepoId, Revision
from store.sources.hub import list_repo, reachable_endpoint
from tests.fakes.hub import COMMIT, FakeHub, git_blob_id, sha256, unused_endpoint

REPO = RepoId("org/repo")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", {"config.json": b"{}", "model.safetensors": b"weights", "con.json": b"", "a:b": b""})
        yield hub


def test_the_first_endpoint_that_answers_is_used(hub: FakeHub) -> None:
    assert reachable_endpoint((unused_endpoint(), hub.endpoint), REPO, timeout_s=2) == hub.endpoint


def test_unreachable_endpoints_are_all_named(hub: FakeHub) -> None:
    hub.faults.stall_everything = True
    dead = unused_endpoint()
    with pytest.raises(HubUnreachable) as caught:
        reachable_endpoint((dead, hub.endpoint), REPO, timeout_s=0.2)
    message = caught.value.message
    assert dead in message
    assert f"{hub.endpoint} did not answer within 0.2 s" in message
    assert "set HF_ENDPOINT" in message


def test_a_name_server_that_hangs_does_not_hold_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> None:
        release.wait(30)
        raise OSError("too late")

    monkeypatch.setattr("socket.getaddrinfo", hang)
    with pytest.raises(HubUnreachable, match="did not answer within"):
        reachable_endpoint(("http://hub.test",), REPO, timeout_s=0.1)
    release.set()


@pytest.mark.parametrize("endpoint", ["nonsense", "http://", "ftp://x", "http://[::1", "http://a b"])
def test_addresses_that_make_no_sense(endpoint: str) -> None:
    with pytest.raises(HubUnreachable, match="set HF_ENDPOINT"):
        reachable_endpoint((endpoint,), REPO, timeout_s=2)


def test_a_listing_has_sizes_and_digests_and_only_safe_names(hub: FakeHub) -> None:
    listing = list_repo(hub.endpoint, REPO, None, None)
    files = {file.path: file for file in listing.files}
    assert (listing.commit, listing.license) == (COMMIT, "apache-2.0")
    assert set(files) == {"config.json", "model.safetensors"}
    assert files["model.safetensors"].digest == sha256(b"weights")
    assert files["config.json"].digest == git_blob_id(b"{}")
    assert files["config.json"].size_bytes == 2


def test_a_mirror_without_digests_or_card(hub: FakeHub) -> None:
    hub.faults.hide_digests = True
    hub.repos["org/repo"].license = None
    listing = list_repo(hub.endpoint, REPO, Revision("main"), None)
    assert listing.license is None
    assert {(file.size_bytes, file.digest) for file in listing.files} == {(None, None)}


def test_what_the_hub_refuses(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no repository org/missing"):
        list_repo(hub.endpoint, RepoId("org/missing"), None, None)
    with pytest.raises(ModelNotFound, match="no revision v9"):
        list_repo(hub.endpoint, REPO, Revision("v9"), None)
    hub.faults.api_statuses = [403]
    with pytest.raises(AccessDenied, match="accept its terms"):
        list_repo(hub.endpoint, REPO, None, "token")


def test_private_repositories_need_the_token(hub: FakeHub) -> None:
    hub.faults.required_token = "hf_secret"
    assert list_repo(hub.endpoint, REPO, None, "hf_secret").commit == COMMIT
    with pytest.raises(ModelNotFound, match="set HF_TOKEN"):
        list_repo(hub.endpoint, REPO, None, None)
    assert [seen.authorization for seen in hub.requests] == ["Bearer hf_secret", None]


def test_an_expired_token_is_left_out_on_the_second_try(hub: FakeHub) -> None:
    hub.faults.required_token = "fresh"
    with pytest.raises(ModelNotFound):
        list_repo(hub.endpoint, REPO, None, "expired")
    assert [seen.authorization for seen in hub.requests] == ["Bearer expired", None]


@pytest.mark.parametrize("commit", ["../../etc", "main", ""])
def test_a_hub_that_talks_nonsense(hub: FakeHub, commit: str) -> None:
    hub.repos["org/repo"].commit = commit
    with pytest.raises(HubUnreachable, match="did not list org/repo"):
        list_repo(hub.endpoint, REPO, None, None)


def test_settings_from_the_environment() -> None:
    environ = {"HF_ENDPOINT": "https://mirror.test/", "HF_HUB_OFFLINE": "ON", "HF_TOKEN": " hf_secret "}
    settings = HubSettings.from_environment(environ)
    assert settings.endpoints == ("https://mirror.test",)
    assert settings.offline
    assert settings.token == "hf_secret"
    assert "hf_secret" not in repr(settings)
    plain = HubSettings.from_environment({"HF_TOKEN_PATH": "/nonexistent/token"})
    assert (plain.endpoints, plain.offline, plain.token) == (("https://huggingface.co",), False, None)
