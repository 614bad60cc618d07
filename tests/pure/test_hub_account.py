"""Whose token is it: a hub that knows it, one that does not, and hubs that answer something else or never."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from store.errors import AccessDenied, HubUnreachable
from store.sources.hub_account import account_name
from tests.fakes.hub import FakeHub, unused_endpoint

PATIENCE_S = 30.0


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.faults.required_token = "hf_right"
        yield hub


def test_the_token_that_is_given_counts_whatever_the_environment_says(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert account_name(hub.endpoint, "hf_right", PATIENCE_S) == "somebody"
    with pytest.raises(AccessDenied, match="does not know this token"):
        account_name(hub.endpoint, "hf_wrong", PATIENCE_S)
    assert [seen.authorization for seen in hub.requests] == ["Bearer hf_right", "Bearer hf_wrong"]


def test_a_name_is_shown_without_control_characters(hub: FakeHub) -> None:
    hub.faults.api_body = json.dumps({"name": "some\x1b[2Jbody" + "y" * 1000}).encode()
    name = account_name(hub.endpoint, "hf_right", PATIENCE_S)
    assert name.startswith("some[2Jbody") and len(name) == 100


@pytest.mark.parametrize("body", [b"{}", b"[]", b"1", b'{"name": null}', b'{"name": ""}', b"<html>", b"\xff", b""])
def test_an_answer_that_names_nobody(hub: FakeHub, body: bytes) -> None:
    hub.faults.api_body = body
    with pytest.raises(HubUnreachable) as failure:
        account_name(hub.endpoint, "hf_right", PATIENCE_S)
    assert failure.value.reason.startswith(hub.endpoint)
    assert failure.value.reason.endswith(("does not say whose token this is", "does not answer as a model hub does"))


def test_an_address_where_nobody_answers() -> None:
    with pytest.raises(HubUnreachable, match="try again later"):
        account_name(unused_endpoint(), "hf_right", PATIENCE_S)


@pytest.mark.parametrize("endpoint", ["ftp://mirror.example", "https://", "http://[", "nonsense"])
def test_an_address_that_is_none(endpoint: str) -> None:
    with pytest.raises(HubUnreachable, match="try again later"):
        account_name(endpoint, "hf_right", PATIENCE_S)


def test_a_hub_that_never_answers_is_not_waited_for(hub: FakeHub) -> None:
    hub.faults.stall_everything = True
    with pytest.raises(HubUnreachable, match=r"did not answer within 0\.2 s"):
        account_name(hub.endpoint, "hf_right", 0.2)
