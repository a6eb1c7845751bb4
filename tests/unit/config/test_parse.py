"""Errors about hostile manifests: what is quoted is short and printable, and no key of a service is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.config.manifest import parse_manifest
from caramba.config.source import read_path, show_path
from caramba.errors import CarambaError, ConfigError, quote, visible

LONGEST = 2000
SECTIONS = ("model", "seed", "groups", "vars", "paper", "launcher", "settings", "plugins", "fit", "parallel")
API_KEY = "sk-proj-Abcdef0123456789Abcdef"


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_manifest({"name": "m", "model": {}, "groups": [], **changes})
    return str(caught.value)


@pytest.mark.parametrize("size", [1_000, 900_000])
def test_parse_long_key_or_value_is_quoted_in_part(size: int) -> None:
    assert len(refusal(**{"k" * size: 1})) < LONGEST
    assert f"({size:,} characters)" in refusal(device="x" * size)
    assert len(refusal(model={"x" * size: {"y" * size: 1}})) < LONGEST
    assert "bits" in refusal(seed=10**size if size < 2_000 else 1 << size)


def test_parse_control_characters_are_escaped() -> None:
    for text in (
        refusal(**{"a\x1b[31m": 1}),
        refusal(device="\x1b[2J"),
        refusal(name="a\x07\u202eb"),
        refusal(**{"a\ufeff\U000e0001": 1}),
    ):
        assert text.replace("\n", "").isprintable(), text
    assert "a\\x1b[31m: unknown key" in refusal(**{"a\x1b[31m": 1})
    assert "a\\nb: unknown key" in refusal(**{"a\nb": 1}), "a key may not begin a line of its own"


def test_error_message_escapes_and_bounds_what_it_quotes() -> None:
    text = str(CarambaError("\x1b]0;x\x07 \ud800" + "y" * 100_000))
    assert text.startswith("\\x1b]0;x\\x07 \\ud800yyy")
    assert len(text) < 5_000
    assert str(CarambaError("two\n  lines")) == "two\n  lines"
    assert visible("caf\xe9\ttab") == "caf\xe9\ttab"


@pytest.mark.parametrize("written", [API_KEY, [API_KEY], {API_KEY: 1}, 1234567890, "hf_" + "a1B2" * 8])
def test_parse_key_env_with_a_secret_does_not_repeat_it(written: Any) -> None:
    text = refusal(paper={"api": {"key_env": written}})
    assert "paper.api.key_env" in text
    for secret in (API_KEY, "1234567890", "a1B2"):
        assert secret not in text


def test_error_message_hides_keys_of_services() -> None:
    assert API_KEY not in str(ConfigError(f"model: got {API_KEY!r}"))
    assert API_KEY not in refusal(seed=API_KEY)
    plain = "runs/sk-short hf_folder_of_llama_with_a_long_name"
    assert str(ConfigError(plain)) == plain


@pytest.mark.parametrize("key", SECTIONS)
@pytest.mark.parametrize("kind", ["mapping", "list"])
def test_parse_fifty_levels_under_any_key_is_a_short_refusal(key: str, kind: str) -> None:
    value: Any = 1
    for _ in range(50):
        value = {"k" * 40: value} if kind == "mapping" else [value]
    assert len(refusal(**{key: value})) < LONGEST


def test_parse_wrong_values_in_fifty_levels_of_topologies_is_a_short_refusal() -> None:
    node: dict[str, Any] = {"type": "RMSNormLayer"}
    for _ in range(50):
        node = {"type": "StackedTopology", "layers": [node, {"type": "x"}]}
    text = refusal(model={"embedder": {"vocab_size": 3, "d_model": 4}, "topology": node})
    assert "d_model: required" in text
    assert len(text) < LONGEST


def test_parse_many_unknown_keys_list_the_known_ones_once() -> None:
    text = refusal(model={f"k{i}": 1 for i in range(30)})
    assert "and 21 more" in text
    assert text.count("Known keys: type, name, embedder") == 1


def test_show_path_is_read_back_unless_it_is_long() -> None:
    path = ("model", "topology", *("layers", 0) * 10, "type")
    assert read_path(show_path(path)) == path
    assert len(show_path(("layers", 0) * 200)) < 320
    assert read_path("vars.\xb2") == ("vars", "\xb2")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (3, "3"),
        ({}, "a mapping"),
        ([1], "a list"),
        ("x" * 100, f"'{'x' * 60}'… (100 characters)"),
    ],
)
def test_quote_names_containers_and_clips_text(value: Any, text: str) -> None:
    assert quote(value) == text
