"""The paper section: closed, with bounds, and refused by name where it is not built."""

from __future__ import annotations

import pytest

from caramba.config.paper import PaperConfig, ReviewConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"titel": "x"}, r"titel: unknown key; did you mean 'title'\?"),
        ({"sections": ["abstract", "abstract"]}, "section 'abstract' is listed twice"),
        ({"sections": []}, "sections"),
        ({"sections": ["resluts"]}, r"sections\[0\].*results"),
        ({"budget": {"max_iterations": 0}}, r"budget\.max_iterations: got 0, expected greater than 0"),
        ({"budget": {"usd_per_million_prompt": 1.0}}, "a price has two parts"),
        ({"api": {"base_url": "localhost:8000"}}, "no http"),
        ({"api": {"base_url": "file:///etc/passwd"}}, "no http"),
        ({"api": {"base_url": "http://me:secret@host/v1"}}, "may not hold a key"),
        ({"api": {"key_env": "sk-123"}}, "key_env"),
        ({"api": {"key": "sk-123"}}, "key: unknown key"),
        ({"api": {"retries": 99}}, "retries"),
        ({"citations": {"sources": ["google"]}}, "sources"),
        ({"_target_": "os.system"}, "would run code"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(plain: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_as(PaperConfig, plain)


def test_groups_compose_and_none_is_the_default() -> None:
    assert freeze(["experiment=smoke"]).manifest.paper is None
    drafted = freeze(["experiment=smoke", "paper=draft", "paper.title=A title"]).manifest.paper
    assert drafted is not None
    assert (drafted.title, drafted.model, drafted.enabled) == ("A title", "gpt-4o", True)
    short = freeze(["experiment=smoke", "paper=report"]).manifest.paper
    assert short is not None
    assert not short.citations.enabled
    with pytest.raises(ConfigError, match=r"paper: no option 'drft'; did you mean 'draft'\?"):
        freeze(["paper=drft"])


def test_a_paper_that_is_not_latex_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"paper\.paper_type: got 'blog_post', expected .*technical_report"):
        freeze(["paper=draft", "paper.paper_type=blog_post"])


def test_an_agents_manifest_names_no_server_variable_or_file() -> None:
    words = ["experiment=smoke", "paper=draft", "origin=agent"]
    assert freeze(words).manifest.origin == "agent"
    for word, key in (
        ("paper.api.base_url=http://evil.example/v1", "api.base_url"),
        ("paper.api.key_env=AWS_SECRET_ACCESS_KEY", "api.key_env"),
        ("paper.citations.bibliography=/etc/passwd", "citations.bibliography"),
    ):
        with pytest.raises(ConfigError, match=rf"origin is an agent may not set paper\.{key}"):
            freeze([*words, word])


def test_options_of_review_and_loop() -> None:
    loop = freeze(["experiment=smoke", "paper=loop", "review.strictness=journal"]).manifest
    assert loop.review is not None
    assert loop.research is not None
    assert (loop.review.strictness, loop.research.max_iterations) == ("journal", 5)
    review = freeze(["experiment=smoke", "paper=review"]).manifest
    assert (review.review, review.research) == (ReviewConfig(), None)
    with pytest.raises(ConfigError, match="may not set review or research"):
        freeze(["experiment=smoke", "paper=loop", "origin=agent"])
    with pytest.raises(ConfigError, match="auto_approve_score is below"):
        freeze(["experiment=smoke", "paper=loop", "research.auto_approve_score=1"])


@pytest.mark.parametrize(("keys", "kept"), [({}, None), ({"max_versions": 3}, 3), ({"auto_version": False}, 1)])
def test_how_many_versions_are_kept(keys: dict, kept: int | None) -> None:
    assert PaperConfig.model_validate(keys).versions_kept == kept
