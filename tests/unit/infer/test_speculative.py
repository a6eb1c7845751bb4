"""Speculation on real tiny models: the same text where it must be, the same distribution everywhere else."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from caramba.config.generate import GenerateConfig
from caramba.errors import ConfigError
from caramba.infer import Generator, SpeculativeGenerator, device_steps, speculative, verification
from caramba.infer.device_steps import DeviceDecoder, EagerDecoder
from caramba.infer.step import distribution
from caramba.infer.verification import SpeculativeStats, verify_drafts
from caramba.model import Model, build_model
from caramba.ops.dba_decode import MAX_QUERIES
from caramba.ops.sample import draw
from tests.unit.infer.test_step_pool import as_on_cuda, captured
from tests.unit.model.model_specs import VOCAB, block, spec, transformer

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
PROMPTS = [PROMPT, [5], [7, 8] * 6]
LONG: dict[str, Any] = {"max_new_tokens": 40, "cache_kind": "fp32"}


def sharp(name: str, seed: int = 0, by: float = 6.0) -> Model:
    model = build_model(transformer(name), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)
    return model.eval()


@pytest.fixture(scope="module", params=["gqa_scaled", "decoupled_tie", "latent_gate"])
def target(request: pytest.FixtureRequest) -> Model:
    return sharp(request.param)


@pytest.fixture(scope="module")
def other() -> Model:
    return sharp("standard", seed=7)


@pytest.mark.parametrize(
    "values", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("extra", [True, False])
def test_lookup_gives_the_text_of_the_plain_generator(target: Model, values: dict[str, Any], extra: bool) -> None:
    (plain,) = Generator(target, **LONG, **values).generate([PROMPT])
    generator = SpeculativeGenerator(target, spec_k=5, spec_extra_token=extra, **LONG, **values)
    (row,) = generator.generate([PROMPT])
    assert row.tokens == plain.tokens
    assert row.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert generator.stats.drafted > 0


def test_greedy_with_any_draft_is_greedy(target: Model, other: Model) -> None:
    values = {"temperature": 0.0, "repetition_penalty": 1.1, **LONG}
    plain = Generator(target, **values).generate([PROMPT])
    for draft in (target, other):
        generator = SpeculativeGenerator(target, draft=draft, spec_method="draft", spec_k=4, **values)
        assert generator.generate([PROMPT])[0].tokens == plain[0].tokens
        if draft is target:
            assert generator.acceptance_rate == 1.0
            # One token comes from prefill; of 5 a round, the last one is what is left.
            assert generator.stats.steps == 8


def test_a_model_that_drafts_for_itself_has_every_sampled_draft_accepted(target: Model) -> None:
    generator = SpeculativeGenerator(target, draft=target, spec_method="draft", top_k=9, temperature=1.4, **LONG)
    (row,) = generator.generate([PROMPT])
    assert generator.acceptance_rate == pytest.approx(1.0, abs=0.05)  # but for the rounding of two shapes
    assert len(row.tokens) == 40
    assert generator.generate([PROMPT])[0] == row
    assert generator.generate([PROMPT], seeds=[8])[0].tokens != row.tokens


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The statistic, and what it stays below with 99.99 % (Wilson and Hilferty)."""
    kept = p > 0
    assert not counts[~kept].any()
    expected = counts.sum() * p[kept]
    dof = int(kept.sum()) - 1
    bound = dof * (1 - 2 / (9 * dof) + 3.72 * (2 / (9 * dof)) ** 0.5) ** 3
    return float(((counts[kept] - expected) ** 2 / expected).sum()), bound


@pytest.mark.parametrize(
    ("draft_seed", "values"),  # seed 0 is the target itself, 7 a bad draft
    [
        (0, {"temperature": 1.1, "top_k": 8, "top_p": 0.97}),
        (7, {"temperature": 1.1, "top_k": 8, "top_p": 0.97}),
        (7, {"temperature": 0.7}),
        (7, {"top_k": 5}),
        (7, {"top_p": 0.8}),
    ],
)
def test_fifty_thousand_verifications_follow_the_target(draft_seed: int, values: dict[str, Any]) -> None:
    model, draft = sharp("standard", by=3), sharp("standard", seed=draft_seed, by=3)
    config = GenerateConfig(**values)
    prompts = torch.tensor([[*PROMPT, token] for token in range(VOCAB)])
    with torch.no_grad():
        p1, q1 = (distribution(m(prompts[:1, :-1])[0, -1], config) for m in (model, draft))
        p2, q2 = (distribution(m(prompts)[:, -1], config) for m in (model, draft))
        p3 = torch.stack(
            [
                distribution(model(torch.cat((prompts, torch.full((VOCAB, 1), token)), 1))[:, -1], config)
                for token in range(VOCAB)
            ],
            dim=1,
        )
    n = 50_000
    u = torch.rand(6, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d1 = draw(q1.expand(n, -1), u[0])
    d2 = draw(q2[d1], u[1])
    target = torch.stack((p1.expand(n, -1), p2[d1], p3[d1, d2]), dim=1)
    proposed = torch.stack((q1.expand(n, -1), q2[d1]), dim=1)
    accepted, token = verify_drafts(target, proposed, torch.stack((d1, d2), 1), u[2:4].T, u[4])
    x1 = torch.where(accepted == 0, token, d1)
    x2 = torch.where(accepted == 0, draw(p2[x1], u[5]), torch.where(accepted == 1, token, d2))
    joint = (p1[:, None] * p2).flatten().numpy()
    counts = np.bincount((x1 * VOCAB + x2).numpy(), minlength=VOCAB * VOCAB)
    common = np.where(n * joint >= 5, joint, 0)  # rare pairs together
    rare = joint.sum() - common.sum()
    counts = np.append(np.where(common > 0, counts, 0), counts[(common == 0)].sum())
    found, bound = chi_square(counts, np.append(common, rare if rare > 1e-9 else 0))
    assert found < bound
    expected = float(torch.minimum(p1, q1).sum())  # the best that any coupling can do
    assert float((accepted >= 1).double().mean()) == pytest.approx(expected, abs=0.01)
    if draft_seed == 0:
        assert bool((accepted == 2).all())
        last = np.bincount(token[(d1 == int(p1.argmax()))].numpy(), minlength=VOCAB)
        assert last.sum() > 1000


def misfit(generator: SpeculativeGenerator, n: int, rows: int) -> tuple[float, float]:
    """Write n texts of three tokens; the statistic of their last two against the model's own, and its bound."""
    model, config = generator.model, generator.config
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, n, rows):
        texts = generator.generate([[1, 2]] * rows, seeds=range(start, start + rows))
        counts.update(row.tokens[1:] for row in texts)
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * 2)
    with torch.no_grad():
        p1 = distribution(model(torch.tensor([[1, 2]]))[0, -1], config)
        two = torch.cat((torch.tensor([[1, 2]]).expand(len(every), -1), every), dim=1)
        found = distribution(model(two)[:, 2:], config)
    p2, p3 = (found[:, at].unflatten(0, (VOCAB, VOCAB)) for at in (0, 1))
    pairs = torch.einsum("a,ab,abc->bc", p1, p2[:, 0], p3).flatten().numpy()
    seen = np.array([counts.get((b, c), 0) for b in range(VOCAB) for c in range(VOCAB)])
    common = n * pairs >= 5
    return chi_square(np.append(seen[common], seen[~common].sum()), np.append(pairs[common], pairs[~common].sum()))


def test_what_a_generator_writes_follows_the_target() -> None:
    values: dict[str, Any] = {"spec_k": 2, "max_new_tokens": 3, "cache_kind": "fp32"}
    draft = sharp("standard", seed=7, by=4)
    generator = SpeculativeGenerator(sharp("standard", by=4), draft=draft, spec_method="draft", **values)
    found, bound = misfit(generator, 3000, 3000)
    assert found < bound
    assert 0.2 < generator.acceptance_rate < 0.9  # neither all accepted nor all drawn anew


@pytest.mark.parametrize(
    ("name", "method", "temperature"),
    [
        ("gqa_scaled", "lookup", 0.9),
        ("decoupled_tie", "draft", 0.9),
        ("latent_gate", "early_exit", 0.9),
        ("decoupled_gate", "early_exit", 0.0),
    ],
)
def test_rows_of_a_batch_are_the_rows_alone(other: Model, name: str, method: str, temperature: float) -> None:
    values: dict[str, Any] = {
        "temperature": temperature,
        "repetition_penalty": 1.2,
        "max_new_tokens": 16,
        "cache_kind": "fp32",
    }
    model, draft = sharp(name), other if method == "draft" else None
    generator = SpeculativeGenerator(model, spec_method=method, draft=draft, spec_k=9, **values)
    rows = generator.generate(PROMPTS)
    stats = generator.stats
    assert stats.not_batched is None
    assert stats.steps < stats.row_steps <= 3 * stats.steps  # batched, each row for as long as it ran
    alone = [generator.generate([prompt], seeds=[1337 + i])[0] for i, prompt in enumerate(PROMPTS)]
    assert [row.tokens for row in rows] == [row.tokens for row in alone]
    if method == "lookup" or not temperature:
        plain = Generator(model, **values).generate(PROMPTS)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]


@pytest.mark.parametrize(("name", "method"), [("gqa_scaled", "early_exit"), ("latent_gate", "early_exit")])
def test_verifying_steps_on_the_device_write_the_same(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "compile_logits", lambda *_, run: run)
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "cache_kind": "fp32", "spec_k": 9}
    model = sharp(name)
    plain = SpeculativeGenerator(model, spec_method=method, **values)
    stepped = SpeculativeGenerator(model, spec_method=method, compiled=True, **values)
    for prompts in (PROMPTS, PROMPTS[:1]):
        wanted = [row.tokens for row in plain.generate(prompts)]
        assert [row.tokens for row in stepped.generate(prompts)] == wanted
        assert (stepped.stats.decode, stepped.stats.not_compiled) == ("compiled", None)
        assert (stepped.stats.steps, stepped.acceptance_rate) == (plain.stats.steps, plain.acceptance_rate)
    graph = SpeculativeGenerator(model, spec_method=method, compiled="graph", **values)
    graph.generate(PROMPTS[:1])
    assert graph.stats.not_compiled == "CUDA graphs need a CUDA device, the model is on cpu"


@pytest.mark.parametrize(("original", "form"), [(400, "compiled"), (18, "eager")])
def test_a_text_within_dynamic_rope_is_batched_whatever_its_bucket(
    original: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "compile_logits", lambda *_, run: run)
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": original}
    model = build_model(spec(block("standard", rope_scaling=scaling)), seed=0).eval()
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8}
    generator = SpeculativeGenerator(model, compiled=True, spec_k=4, **values)
    prompts = [[1, 2, 3, 1, 2, 3], [4, 5, 4, 5, 4, 5]]
    wanted = [row.tokens for row in Generator(model, **values).generate(prompts)]
    for _ in range(2):
        assert [row.tokens for row in generator.generate(prompts)] == wanted
        stats = generator.stats
        assert isinstance(stats, SpeculativeStats)
        assert (stats.decode, stats.most_rows, stats.not_batched) == (form, 2, None)
        # 14 tokens and 4 drafts, and the 8 that a forward may take beyond them
        assert (stats.not_compiled or "the cache holds 26").endswith("the cache holds 26")
        assert (stats.not_compiled is None) == (form == "compiled")
    longest = SpeculativeGenerator(model, compiled=True, spec_k=4, max_seq_len=40, **values)
    longest.generate(prompts)
    kept = longest._kept
    assert (None if kept is None else kept.key[2]) == (40 + 4 + MAX_QUERIES if form == "compiled" else None)


def test_first_blocks_draft_on_the_models_own_cache() -> None:
    target = sharp("decoupled_tie")
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16}
    plain, early = (
        Generator(target, **values),
        SpeculativeGenerator(target, spec_method="early_exit", **values),
    )
    assert [row.tokens for row in plain.generate([PROMPT])] == [row.tokens for row in early.generate([PROMPT])]
    assert early.stats.cache_bytes == plain.stats.cache_bytes
    assert early.speed_up() is not None


@pytest.mark.parametrize("method", ["lookup", "early_exit"])
def test_rows_run_in_turn_where_the_cache_cannot_hold_them(method: str) -> None:
    model = sharp("decoupled")
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "cache_kind": "q8_0"}
    generator = SpeculativeGenerator(model, spec_method=method, **values)
    assert [row.tokens for row in generator.generate(PROMPTS)] == [
        row.tokens for row in Generator(model, **values).generate(PROMPTS)
    ]
    assert "its tail is packed by the host" in (generator.stats.not_batched or "")
    assert generator.stats.steps == generator.stats.row_steps


def test_tokens_a_step_are_those_of_steps(target: Model) -> None:
    """The first token of a row comes of its prompt, and an end mark takes a step as any token does."""
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    drawn = Generator(target, **values).generate(PROMPTS)
    end = next(token for token in drawn[0].tokens[2:] if token not in drawn[0].tokens[:2])
    for more in ({"max_new_tokens": 2}, {"max_new_tokens": 12, "eos_token_id": end}):
        generator = SpeculativeGenerator(target, spec_k=1, **values | more)
        generator.generate(PROMPTS)
        stats = generator.stats
        assert generator.tokens_per_step == 1 + stats.accepted / stats.row_steps, more
    assert any(row.finish == "eos" for row in generator.generate(PROMPTS))


def test_misuse_is_named(target: Model, other: Model) -> None:
    with pytest.raises(ConfigError, match=r"spec_draft_layers=2 of a model of 2 blocks; expected 1 to 1"):
        SpeculativeGenerator(target, spec_method="early_exit", spec_draft_layers=2)
    with pytest.raises(ConfigError, match=r"spec_draft_layers=1 is of spec_method=early_exit"):
        SpeculativeGenerator(target, spec_draft_layers=1)
    with pytest.raises(ConfigError, match=r"spec_method=draft needs a draft model"):
        SpeculativeGenerator(target, spec_method="draft")
    with pytest.raises(ConfigError, match=r"spec_method=lookup has no use for a draft model"):
        SpeculativeGenerator(target, draft=other)
    with pytest.raises(ConfigError, match=r"spec_k: got 0, expected greater than or equal to 1"):
        SpeculativeGenerator(target, spec_k=0)
    with pytest.raises(ConfigError, match=r"is above 1, which no share reaches"):
        SpeculativeGenerator(target, spec_disable_below_accept=0.9, hysteresis=0.2)
    spec = transformer("standard").model_dump()
    spec["embedder"]["vocab_size"] = VOCAB + 1
    small = build_model(type(transformer("standard")).model_validate(spec), seed=0)
    with pytest.raises(ConfigError, match=f"draft model has {VOCAB + 1} vocabulary entries, the target {VOCAB}"):
        SpeculativeGenerator(target, draft=small, spec_method="draft")


def test_an_estimate_is_against_steps_of_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made: list[DeviceDecoder] = []

    def choose(host: EagerDecoder) -> Any:
        asked.append(host.config.compiled)
        if host.config.compiled is False:
            return host, "eager", None
        steps, *rest = as_on_cuda(host)
        made.append(steps)
        return steps, *rest

    def slow(*given: Any) -> Any:
        time.sleep(1.5)
        return captured(*given)

    monkeypatch.setattr(device_steps, "capture_graph", slow)
    monkeypatch.setattr(speculative, "choose_steps", choose)
    generator = SpeculativeGenerator(build_model(transformer("gqa_scaled"), seed=0), max_new_tokens=8)
    generator.generate([[1, 2, 3]])
    eager = generator.speed_up()
    generator.stats.decode = "graph"
    graph = generator.speed_up()
    assert asked == [False, "graph"]
    assert [steps.captures for steps in made] == [1]
    assert eager is not None
    assert graph is not None
    step = graph * generator.stats.decode_s / generator.stats.steps / generator.tokens_per_step
    assert step < 0.15, "the capture is no step"


def test_auto_speculates_without_graphs_where_their_cache_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(transformer("gqa_scaled"), seed=0)
    inner = model.new_context

    def small(batch_size: int, max_tokens: int, *given: Any, **more: Any) -> Any:
        if max_tokens > 520:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(batch_size, max_tokens, *given, **more)

    monkeypatch.setattr(model, "new_context", small)
    monkeypatch.setattr(speculative, "resolve_form", lambda *_: ("graph", None))
    values: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0}
    generator = SpeculativeGenerator(model, **values)
    generator.generate([[1, 2] * 245])
    reason = "the longer cache that it takes to keep graphs does not fit"
    assert (generator.stats.decode, generator.stats.not_compiled) == ("eager", reason)
    with pytest.raises(torch.OutOfMemoryError):
        SpeculativeGenerator(model, compiled="graph", **values).generate([[1, 2] * 245])
