"""Listing repositories over the APIs of the hub and of ModelScope, and choosing among mirrors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import AccessDenied, Cancelled, HubUnreachable, ModelNotFound
from store.hub_settings import HubSettings
from store.names import Digest, RepoFile, RepoId, Revision
from store.progress import Reporter
from store.sources import hub as hub_api
from store.sources import modelscope as modelscope_api
from store.sources.json_api import ApiAnswer, ApiRequest
from store.sources.listing import RepoListing
from store.sources.lookup import LookupPatience, find_repo
from tests.fakes.hub import COMMIT, OTHER_COMMIT, FakeHub, git_blob_id, sha256, unused_endpoint

REPO = RepoId("org/repo")
KEYS = ["sha", "siblings", "rfilename", "size", "blobId", "lfs", "sha256", "oid", "cardData", "license", "gated",
        "Code", "Data", "Files", "Path", "Type", "Size", "Sha256", "path", "type"]  # fmt: skip
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "con.json": b"", "a:b": b""}
PATIENCE = LookupPatience(connect_s=10.0, begin_s=10.0, answer_s=20.0, grace_s=10.0, connected_grace_s=10.0)
IMPATIENT = LookupPatience(connect_s=0.4, begin_s=0.5, answer_s=20.0, grace_s=0.05, connected_grace_s=0.05)
SHORT_GRACE = LookupPatience(connect_s=10.0, begin_s=10.0, answer_s=20.0, grace_s=0.05, connected_grace_s=0.05)
SILENT = Reporter(lambda _: None, lambda: False)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", dict(FILES))
        yield hub


@pytest.fixture
def mirror() -> Iterator[FakeHub]:
    with FakeHub() as mirror:
        mirror.add("org/repo", dict(FILES))
        yield mirror


def find(
    *endpoints: str,
    repo: str = "org/repo",
    revision: str | None = None,
    token: str | None = None,
    patience: LookupPatience = PATIENCE,
    **settings: object,
) -> tuple[RepoListing, ...]:
    hub = HubSettings(endpoints=endpoints, token=token, **settings)  # type: ignore[arg-type]
    return find_repo(hub, RepoId(repo), Revision(revision) if revision else None, SILENT, patience)


def endpoints_of(listings: tuple[RepoListing, ...]) -> list[str]:
    return [listing.endpoint for listing in listings]


def test_a_listing_has_sizes_and_digests_and_only_safe_names(hub: FakeHub) -> None:
    listing = find(hub.endpoint)[0]
    files = {file.path: file for file in listing.files}
    assert (listing.commit, listing.license) == (COMMIT, "apache-2.0")
    assert set(files) == {"config.json", "model.safetensors"}
    assert files["model.safetensors"].digest == sha256(b"weights")
    assert files["config.json"].digest == git_blob_id(b"{}")
    assert files["config.json"].size_bytes == 2
    assert listing.url_of(files["config.json"].path) == f"{hub.endpoint}/org/repo/resolve/{COMMIT}/config.json"


def test_a_mirror_without_digests_or_card(hub: FakeHub) -> None:
    hub.faults.hide_digests = True
    hub.repos["org/repo"].license = None
    listing = find(hub.endpoint, revision="main")[0]
    assert listing.license is None
    assert {(file.size_bytes, file.digest) for file in listing.files} == {(None, None)}


def test_sizes_that_the_listing_leaves_out_come_from_the_tree_page_by_page(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Links to further pages name another host, as those of a mirror do.
    hub.faults.page_size = 1
    hub.faults.link_base = unused_endpoint()
    monkeypatch.setattr(
        "tests.fakes.hub_handler._sibling", lambda repo, name, content, *, with_sizes: {"rfilename": name}
    )
    files = {file.path: file for file in find(hub.endpoint)[0].files}
    assert {path: file.digest for path, file in files.items()} == {
        "config.json": git_blob_id(b"{}"), "model.safetensors": sha256(b"weights"),
    }  # fmt: skip
    assert [seen.path for seen in hub.requests].count(f"/api/models/org/repo/tree/{COMMIT}") == 4


def test_the_preferred_endpoint_wins_and_the_others_come_along(hub: FakeHub, mirror: FakeHub) -> None:
    assert endpoints_of(find(hub.endpoint, mirror.endpoint)) == [hub.endpoint, mirror.endpoint]
    assert endpoints_of(find(mirror.endpoint, hub.endpoint)) == [mirror.endpoint, hub.endpoint]


def test_an_endpoint_without_the_repository_gives_way(hub: FakeHub, mirror: FakeHub) -> None:
    del hub.repos["org/repo"]
    assert endpoints_of(find(hub.endpoint, unused_endpoint(), mirror.endpoint)) == [mirror.endpoint]


def test_an_endpoint_that_stalls_gives_way(hub: FakeHub, mirror: FakeHub) -> None:
    hub.faults.stall_everything = True
    settings = HubSettings(endpoints=(hub.endpoint, mirror.endpoint))
    assert endpoints_of(find_repo(settings, REPO, None, SILENT, SHORT_GRACE)) == [mirror.endpoint]


def test_a_dead_hub_is_waited_for_once_per_network(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_everything = True
    settings = HubSettings(endpoints=(hub.endpoint, mirror.endpoint), network_memory=tmp_path / "reach.json")
    assert endpoints_of(find_repo(settings, REPO, None, SILENT, SHORT_GRACE)) == [mirror.endpoint]
    # A grace that would never end, were anyone still waited for.
    endless = LookupPatience(600.0, 600.0, 600.0, 600.0, 600.0)
    assert endpoints_of(find_repo(settings, REPO, None, SILENT, endless)) == [mirror.endpoint]


def test_what_is_remembered_is_forgotten_when_it_fails(hub: FakeHub, mirror: FakeHub, tmp_path: Path) -> None:
    hub.faults.stall_everything = True
    memory = tmp_path / "reach.json"
    settings = HubSettings(endpoints=(hub.endpoint, mirror.endpoint), network_memory=memory)
    find_repo(settings, REPO, None, SILENT, SHORT_GRACE)
    assert hub.endpoint in memory.read_text()
    hub.faults.stall_everything = False
    del mirror.repos["org/repo"]
    assert endpoints_of(find_repo(settings, REPO, None, SILENT, PATIENCE)) == [hub.endpoint]
    assert hub.endpoint not in memory.read_text()


@pytest.mark.parametrize("content", [b"", b"not json", b'{"x": 1}', b"[]"])
def test_a_spoilt_memory_counts_as_none(hub: FakeHub, tmp_path: Path, content: bytes) -> None:
    memory = tmp_path / "reach.json"
    memory.write_bytes(content)
    assert endpoints_of(find(hub.endpoint, network_memory=memory)) == [hub.endpoint]


def test_unreachable_endpoints_are_all_named(hub: FakeHub) -> None:
    hub.faults.stall_everything = True
    dead = unused_endpoint()
    with pytest.raises(HubUnreachable) as caught:
        find(dead, hub.endpoint, patience=IMPATIENT)
    message = caught.value.message
    assert f"{dead} failed" in message
    assert f"{hub.endpoint} did not answer within 0.5 s" in message
    assert "set HF_ENDPOINT or hub_mirrors" in message


def test_missing_here_and_unreachable_there_are_both_told(hub: FakeHub) -> None:
    dead = unused_endpoint()
    with pytest.raises(ModelNotFound) as caught:
        find(dead, hub.endpoint, repo="org/missing")
    message = caught.value.message
    assert f"{hub.endpoint} has no repository org/missing that this account may read" in message
    assert f"{dead} failed" in message
    assert "`quire login`" in message


def test_a_name_server_that_hangs_does_not_hold_the_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> None:
        release.wait(30)
        raise OSError("too late")

    monkeypatch.setattr("socket.getaddrinfo", hang)
    with pytest.raises(HubUnreachable, match=r"did not answer within 0\.4 s"):
        find("http://hub.test", patience=IMPATIENT)
    release.set()


def test_certificates_that_are_not_there_are_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/absent/certificates.pem")
    with pytest.raises(HubUnreachable, match="The certificates of this machine cannot be read"):
        find(hub.endpoint)


def test_a_lookup_can_be_cancelled(hub: FakeHub) -> None:
    hub.faults.stall_everything = True
    with pytest.raises(Cancelled):
        find_repo(HubSettings(endpoints=(hub.endpoint,)), REPO, None, Reporter(lambda _: None, lambda: True), PATIENCE)


@pytest.mark.parametrize("endpoint", ["nonsense", "http://", "ftp://x", "http://[::1", "http://a b", ""])
def test_addresses_that_make_no_sense(endpoint: str) -> None:
    with pytest.raises(HubUnreachable, match="set HF_ENDPOINT"):
        find(endpoint)


def test_what_the_hub_refuses(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no repository org/missing"):
        find(hub.endpoint, repo="org/missing")
    with pytest.raises(ModelNotFound, match="no revision v9"):
        find(hub.endpoint, revision="v9")
    hub.faults.api_statuses = [403]
    with pytest.raises(AccessDenied, match=r"refuses org/repo \(HTTP status 403\); run `quire login`"):
        find(hub.endpoint, token="token")
    hub.faults.api_statuses = [500]
    with pytest.raises(HubUnreachable, match="HTTP status 500"):
        find(hub.endpoint)


def test_a_busy_hub_is_asked_again(hub: FakeHub) -> None:
    hub.faults.retry_after = "0"
    hub.faults.api_statuses = [429, 503]
    assert find(hub.endpoint)[0].commit == COMMIT
    hub.faults.api_statuses = [429, 503, 502]
    with pytest.raises(HubUnreachable, match="HTTP status 502"):
        find(hub.endpoint)
    hub.faults.retry_after = "3600"
    hub.faults.api_statuses = [429]
    with pytest.raises(HubUnreachable, match="HTTP status 429"):
        find(hub.endpoint)


def test_private_repositories_need_the_token(hub: FakeHub) -> None:
    hub.faults.required_token = "hf_secret"
    assert find(hub.endpoint, token="hf_secret")[0].commit == COMMIT
    with pytest.raises(ModelNotFound, match="`quire login`"):
        find(hub.endpoint)
    assert [seen.authorization for seen in hub.requests] == ["Bearer hf_secret", None]


def test_an_expired_token_is_left_out_on_the_second_try(hub: FakeHub) -> None:
    hub.faults.required_token = "fresh"
    with pytest.raises(ModelNotFound):
        find(hub.endpoint, token="expired")
    assert [seen.authorization for seen in hub.requests] == ["Bearer expired", None]


def test_a_token_goes_to_the_host_it_belongs_to_alone(hub: FakeHub, mirror: FakeHub) -> None:
    find(hub.endpoint, mirror.endpoint, token="hub-token")
    find(hub.endpoint, mirror.endpoint, mirror_tokens={mirror.endpoint: "mirror-token"})
    assert [seen.authorization for seen in hub.requests] == ["Bearer hub-token", None]
    assert [seen.authorization for seen in mirror.requests] == [None, "Bearer mirror-token"]


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_mirror_that_sends_its_visitors_elsewhere_is_that_other_place(
    hub: FakeHub, mirror: FakeHub, status: int
) -> None:
    mirror.faults.redirect_api_to = hub.endpoint
    mirror.faults.redirect_status = status
    listing = find(mirror.endpoint, token="secret")[0]
    assert (listing.endpoint, listing.resolve_base) == (hub.endpoint, f"{hub.endpoint}/org/repo/resolve/{COMMIT}")
    assert [seen.authorization for seen in mirror.requests] == ["Bearer secret"]
    assert {seen.authorization for seen in hub.requests} == {None}


@pytest.mark.parametrize("target", ["file:///etc/passwd#", "gopher://x", ""])
def test_redirects_that_lead_nowhere(hub: FakeHub, target: str) -> None:
    hub.faults.redirect_api_to = target
    with pytest.raises(HubUnreachable, match="redirects"):
        find(hub.endpoint)


@pytest.mark.parametrize("commit", ["../../etc", "main", ""])
def test_a_commit_that_is_none(hub: FakeHub, commit: str) -> None:
    hub.repos["org/repo"].commit = commit
    with pytest.raises(HubUnreachable, match="no usable listing of org/repo"):
        find(hub.endpoint)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'{"sha": 1}', b'{"siblings": []}', b"[" * 100_000, b'{"sha": "' + b"\xff" * 40 + b'"}',
     b'{"sha": "' + COMMIT.encode() + b'", "siblings": [{"rfilename": "x", "blobId": "../../x", "size": 1}]}'],
)  # fmt: skip
def test_listings_that_make_no_sense(hub: FakeHub, body: bytes) -> None:
    hub.faults.api_body = body
    with pytest.raises(HubUnreachable, match="no usable listing of org/repo"):
        find(hub.endpoint)


def test_a_listing_without_end_is_cut_off(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.sources.json_api.MAX_ANSWER_BYTES", 2**20)
    hub.faults.api_padding_bytes = 2**21
    with pytest.raises(HubUnreachable, match="sent a listing of more than 1 MiB"):
        find(hub.endpoint)


def test_modelscope_lists_with_digests_and_a_fingerprint_for_a_commit(hub: FakeHub) -> None:
    listing = find(repo="ms:org/repo", modelscope_endpoint=hub.endpoint, modelscope_token="ms")[0]
    files = {file.path: file for file in listing.files}
    assert set(files) == {"config.json", "model.safetensors"}
    assert files["model.safetensors"].digest == sha256(b"weights")
    assert listing.url_of(files["config.json"].path) == f"{hub.endpoint}/models/org/repo/resolve/master/config.json"
    assert hub.requests[0].authorization == "Bearer ms"
    assert find(repo="ms:org/repo", modelscope_endpoint=hub.endpoint)[0].commit == listing.commit
    hub.repos["org/repo"].push(FILES | {"model.safetensors": b"other"}, OTHER_COMMIT)
    assert find(repo="ms:org/repo", modelscope_endpoint=hub.endpoint)[0].commit != listing.commit


def test_modelscope_lists_in_pages(hub: FakeHub) -> None:
    hub.faults.page_size = 50
    names = [f"{number}.json" for number in range(120)]
    hub.add("org/many", dict.fromkeys(names, b"{}"))
    listing = find(repo="ms:org/many", modelscope_endpoint=hub.endpoint)[0]
    assert [file.path for file in listing.files] == names
    assert len(hub.requests) == 3


def test_what_modelscope_refuses(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no repository ms:org/missing"):
        find(repo="ms:org/missing", modelscope_endpoint=hub.endpoint)
    with pytest.raises(ModelNotFound, match="lists no files of ms:org/repo at revision v9"):
        find(repo="ms:org/repo", revision="v9", modelscope_endpoint=hub.endpoint)
    hub.faults.api_statuses = [401]
    with pytest.raises(AccessDenied, match="set MODELSCOPE_API_TOKEN"):
        find(repo="ms:org/repo", modelscope_endpoint=hub.endpoint)
    hub.faults.api_body = b"{"
    with pytest.raises(HubUnreachable, match="set MODELSCOPE_ENDPOINT"):
        find(repo="ms:org/repo", modelscope_endpoint=hub.endpoint)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from([COMMIT, "../x", "a" * 64]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@given(JSON, st.sampled_from([hub_api, modelscope_api]))
def test_no_listing_does_more_than_fail(value: object, api: ModuleType) -> None:
    answer = ApiAnswer(200, json.dumps(value).encode(), 0.0, "", None, "http://hub.test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "get", lambda *_: answer)
        try:
            listing = api.list_repo("http://hub.test", REPO, None, None, ApiRequest(1.0, float("inf")))
        except (HubUnreachable, ModelNotFound):
            return
    assert all(isinstance(file.path, RepoFile) for file in listing.files)
    assert all(file.digest is None or isinstance(file.digest, Digest) for file in listing.files)
    assert listing.resolve_base.startswith("http://hub.test/")


def test_settings_hold_addresses_once_and_show_no_token() -> None:
    settings = HubSettings(endpoints=("https://a.test/", "https://b.test", "https://a.test"), token="hf_secret")
    assert settings.endpoints == ("https://a.test", "https://b.test")
    assert (settings.token_for("https://a.test"), settings.token_for("https://b.test")) == ("hf_secret", None)
    assert "hf_secret" not in repr(settings)
