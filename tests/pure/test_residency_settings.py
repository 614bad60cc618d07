"""The models that are loaded at start: how they are written, and which shares are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import SettingsError
from app.residency_settings import ResidentSettings, check_shares, read_residents
from app.settings import Settings, load_settings

FILE = """
[[resident]]
model = "qwen3:4b"
share = 0.65
pin = true
keep_alive = "2h"
max_model_len = 8192
device = "cuda:1"

[[resident]]
model = "smollm2:135m"
"""


def load(
    tmp_path: Path, config: str = "", environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(config)
    return load_settings(flags, environ=environ or {}, config_file=file)


def resident(model: str, share: float | None = None, device: str | None = None) -> ResidentSettings:
    return ResidentSettings(model=model, share=share, device=device)


def test_tables_of_the_config_file(tmp_path: Path) -> None:
    settings = load(tmp_path, FILE)

    first, second = settings.residents
    assert (first.model, first.share, first.pin, first.keep_alive) == ("qwen3:4b", 0.65, True, 7200)
    assert (first.max_model_len, first.device) == (8192, "cuda:1")
    assert second == ResidentSettings(model="smollm2:135m")
    assert settings.origin("residents").startswith("config file")


def test_flags_go_before_the_file_and_the_environment_between(tmp_path: Path) -> None:
    environ = {"QUIRE_RESIDENTS": "a=0.5, b"}

    assert load(tmp_path, FILE, environ).residents == (resident("a", 0.5), resident("b"))
    assert load(tmp_path, FILE, environ, {"residents": ["c"]}).residents == (resident("c"),)


@pytest.mark.parametrize(
    ("written", "model", "share"),
    [
        ("qwen3:4b=0.65", "qwen3:4b", 0.65),
        ("qwen3:4b", "qwen3:4b", None),
        ("org/repo:Q4_K_M=.5", "org/repo:Q4_K_M", 0.5),
        ("pypi:package==1.0", "pypi:package==1.0", None),
        ("pypi:package==1.0=0.25", "pypi:package==1.0", 0.25),
        ("/models/a=b.gguf", "/models/a=b.gguf", None),
        ("/models/a=b.gguf=1", "/models/a=b.gguf", 1.0),
    ],
)
def test_a_name_with_its_share(written: str, model: str, share: float | None) -> None:
    assert read_residents([written], "command line") == (resident(model, share),)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (["qwen3:4b=x"], "The share 'x' of qwen3:4b .*command line.* not a number"),
        (["qwen3:4b="], "The share '' of qwen3:4b"),
        (["qwen3:4b=65"], "its share is 65; give a fraction above 0 and at most 1"),
        (["qwen3:4b=0"], "its share is 0"),
        (["qwen3:4b=nan"], "its share is nan"),
        (["no name"], "not a model name"),
        ([""], "model without a name .*must not be empty"),
        (["smollm2:135m", "SmolLM2:135m=0.1"], "smollm2:135m is named twice"),
        ("smollm2:135m", "is not a list of models.*\\[\\[resident\\]\\]"),
        ([1], "neither a name nor a table"),
        ([{"share": 0.5}], "missing required field `model`"),
        ([{"model": "a", "shore": 0.5}], "\\[\\[resident\\]\\] a .*unknown field `shore`"),
        ([{"model": "a", "share": "0.5"}], "Expected `float.*share"),
        ([{"model": "a", "share": True}], "\\[\\[resident\\]\\] a"),
        ([{"model": 5}], "\\[\\[resident\\]\\] 5"),
        ([{"model": "a", "keep_alive": "soon"}], "keep_alive 'soon' is not a duration"),
        ([{"model": "a", "keep_alive": []}], "\\[\\[resident\\]\\] a"),
        ([{"model": "a", "max_model_len": 0}], "give at least 1"),
    ],
)
def test_what_is_refused_names_the_entry_and_where_it_stands(raw: Any, match: str) -> None:
    with pytest.raises(SettingsError, match="command line") as refused:
        read_residents(raw, "command line")
    with pytest.raises(SettingsError, match=f"(?i){match}"):
        read_residents(raw, "command line")
    assert refused.value.message.endswith(".")


@given(st.text(max_size=40))
def test_any_text_is_a_resident_or_refused(text: str) -> None:
    try:
        (read,) = read_residents([text], "here")
    except SettingsError:
        return
    assert read.share is None or 0 < read.share <= 1


def test_shares_above_the_limit_are_refused_with_their_sum() -> None:
    models = (resident("a", 0.65), resident("b", 0.25), resident("c", 0.1))

    with pytest.raises(SettingsError, match=r"0\.65 \(a\) \+ 0\.25 \(b\) \+ 0\.1 \(c\) = 1, above the 0\.92 that"):
        check_shares(models, limit=0.92, default_share=None, devices=("cuda:0",))
    check_shares(models, limit=0.92, default_share=None, devices=("cuda:0", "cuda:1"))
    check_shares(models[:2], limit=0.92, default_share=None, devices=("cpu",))


def test_one_device_may_be_overfull_while_another_is_empty() -> None:
    models = (resident("a", 0.5, "cuda"), resident("b", 0.5, "cuda:0"), resident("c", 0.9, "cuda:1"))

    with pytest.raises(SettingsError, match=r"cuda:0 come to 0\.5 "):
        check_shares(models, limit=0.92, default_share=None, devices=("cuda:0", "cuda:1"))
    check_shares(models[1:], limit=0.92, default_share=None, devices=("cuda:0", "cuda:1"))


def test_what_goes_to_ram_takes_nothing_of_the_gpus() -> None:
    models = (resident("a", 0.9), resident("b", 0.5, "cpu"))

    check_shares(models, limit=0.92, default_share=None, devices=("cuda:0",))
    with pytest.raises(SettingsError, match=r"= 1\.4"):
        check_shares(models, limit=0.92, default_share=None, devices=("cpu",))


def test_models_without_a_share_have_that_of_all() -> None:
    models = (resident("a"), resident("b"))

    check_shares(models, limit=0.92, default_share=None, devices=("cpu",))
    check_shares(models, limit=0.92, default_share=0.46, devices=("cpu",))
    with pytest.raises(SettingsError, match=r"= 1\.2"):
        check_shares(models, limit=0.92, default_share=0.6, devices=("cpu",))


def test_a_share_that_no_device_has_is_refused_however_many_there_are() -> None:
    with pytest.raises(SettingsError, match=r"one device come to 0\.95"):
        check_shares((resident("a", 0.95),), limit=0.92, default_share=None, devices=("cuda:0", "cuda:1"))


def test_rounding_is_no_reason_to_refuse() -> None:
    check_shares((resident("a", 0.6), resident("b", 0.32)), limit=0.92, default_share=None, devices=("cpu",))


@pytest.mark.parametrize(
    ("config", "environ", "flags", "match"),
    [
        ("memory_limit = 1.2", {}, {}, "at most 1"),
        ("", {"QUIRE_MEMORY_LIMIT": "0"}, {}, "environment QUIRE_MEMORY_LIMIT.*above 0"),
        ("", {}, {"gpu_memory_utilization": 0.95}, "memory_limit allows all models together 0.92"),
        ("keep_alive = 'soon'", {}, {}, "keep_alive .*config.toml.*not a duration"),
        ("keep_alive = []", {}, {}, "keep_alive .*config.toml.*not a duration"),
        ("", {"QUIRE_MAX_KEEP_ALIVE": "x"}, {}, "environment QUIRE_MAX_KEEP_ALIVE"),
        ("resident = 'a'", {}, {}, "is not a list of models"),
    ],
)
def test_settings_of_residency_that_are_refused(
    tmp_path: Path, config: str, environ: dict[str, str], flags: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        load(tmp_path, config, environ, flags)


def test_durations_are_seconds_once_they_are_settings(tmp_path: Path) -> None:
    assert (load(tmp_path).keep_alive, load(tmp_path).max_keep_alive) == (1800, math.inf)
    assert load(tmp_path, "keep_alive = '1h30m'\nmax_keep_alive = 60").max_keep_alive == 60
    assert load(tmp_path, "", {"QUIRE_KEEP_ALIVE": "-1"}).keep_alive == math.inf
    assert load(tmp_path, "", {}, {"keep_alive": "0"}).keep_alive == 0
