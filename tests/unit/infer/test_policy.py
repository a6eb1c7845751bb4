"""The cache policy on a real tiny model and real text: every choice is recomputed here by hand."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec
from caramba.config.parse import parse_as
from caramba.data import ByteTokenizer
from caramba.errors import ConfigError, DataError
from caramba.infer import EvalText, Generator, policy
from caramba.infer.generator import planned
from caramba.infer.policy import CachePolicy, FormatCandidate, choose, fed_tokens
from caramba.infer.policy_measure import Quality, make_needles
from caramba.model import Model, build_model
from tests.unit.model.model_specs import transformer

BATCH, TOKENS = 1, 600
LENGTH = 512  # of the one window that the text holds
WIDE = {
    "n_heads": 4,
    "mode": "decoupled",
    "sem_dim": 32,
    "geo_dim": 32,
    "v_dim": 64,
}  # whole blocks in every stream
LOOSE: dict[str, Any] = {"cache_quality_max_delta_nll": 10.0, "cache_quality_max_ppl_ratio": 1e4}
QUICK: dict[str, Any] = {"cache_kind": "auto", "cache_auto_benchmark": False, **LOOSE}
Q8, Q4 = KVCacheKind.Q8_0, KVCacheKind.Q4_0


@pytest.fixture(scope="module")
def model() -> Model:
    return small("decoupled", **WIDE)


def small(name: str, **attention: Any) -> Model:
    spec = transformer(name, repeat=1).model_dump()
    spec["embedder"]["vocab_size"] = 257
    spec["topology"]["layers"][0]["layers"][0]["layers"][0]["layers"][1].update(attention)
    model = build_model(ModelSpec.model_validate(spec), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "os.txt"
    path.write_text(Path(inspect.getsourcefile(os) or "").read_text()[: LENGTH + 1])
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path))
    return tmp_path


def policy_of(model: Model, text: Path | None, **values: Any) -> CachePolicy:
    named = {} if text is None else {"cache_quality_text": str(text)}
    return CachePolicy(model, ByteTokenizer(), parse_as(GenerateConfig, QUICK | named | values), None)


@torch.no_grad()
def by_hand(model: Model, text: Path, kind: KVCacheKind) -> tuple[float, float]:
    """Delta NLL and KL of a cache in chunks of its 64-token tail against none."""
    ids = torch.tensor(ByteTokenizer().encode(text.read_text()))
    x, y = ids[None, :-1], ids[1:, None]
    ctx = model.new_context(1, LENGTH, kind)
    cached = torch.cat([model(part, ctx) for part in x.split(64, dim=1)], dim=1)[0].double().log_softmax(-1)
    exact = model(x)[0].double().log_softmax(-1)
    delta, kl = (exact - cached).gather(1, y).mean(), (exact.exp() * (exact - cached)).sum(-1).mean()
    return float(delta), float(kl)


def limit_between(model: Model, text: Path) -> float:
    """A KL that q8_0 stays below by far and q4_0 exceeds."""
    low, high = by_hand(model, text, Q8)[1], by_hand(model, text, Q4)[1]
    assert high > 30 * low
    return (low * high) ** 0.5


def test_the_choice_is_the_one_that_a_hand_computes(model: Model, text: Path, home: Path) -> None:
    limit = limit_between(model, text)
    found = policy_of(model, text, cache_quality_max_mean_kl=limit).decide(BATCH, TOKENS)
    candidates = {one.kind: one for one in found.candidates}
    assert list(candidates) == ["bf16", "q8_0", "mixed", "nf4", "q4_0"]
    for kind, one in candidates.items():
        delta, kl = by_hand(model, text, kind)
        assert one.quality is not None
        assert one.quality.mean_kl == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert one.quality.delta_nll == pytest.approx(delta, rel=1e-3, abs=1e-6)
        assert one.nbytes == model.new_context(BATCH, TOKENS, kind, static=True).nbytes()
        assert one.is_good == (kl <= limit and one.quality.needle_kl <= limit)
    assert candidates[Q8].is_good
    assert "mean KL" in candidates[Q4].verdict
    assert found.kind is min((one for one in candidates.values() if one.is_good), key=lambda one: one.nbytes).kind
    assert "the model finds none without a cache either" in found.reason
    (file,) = (home / "runtime_plans").iterdir()
    assert json.loads(file.read_text())["last_decision"] == found.record()


def test_windows_are_as_long_as_the_generation_up_to_what_is_asked_for(model: Model, text: Path) -> None:
    whole = policy_of(model, text).decide(BATCH, TOKENS)
    assert whole.facts["windows_of"] == LENGTH
    assert "cache_quality_max_tokens" not in whole.reason
    short = policy_of(model, text, cache_quality_max_tokens=256).decide(BATCH, TOKENS)
    assert short.facts["windows_of"] == 256
    assert short.is_measured_now, "what was measured on longer windows is not taken over"
    assert short.reason.endswith("; quality is that of windows of 256 tokens (cache_quality_max_tokens)")


def test_a_plan_is_read_again_and_only_for_the_same_model(
    model: Model, text: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"cache_quality_max_mean_kl": 1.0, "cache_budget_mb": 0.042}  # of bf16 alone
    values |= {"cache_auto_benchmark": True, "cache_auto_bench_steps": 2}
    first = policy_of(model, text, **values).decide(BATCH, 160)
    monkeypatch.setattr(policy, "measure_quality", lambda *_: pytest.fail("measured"))
    again = policy_of(model, text, **values).decide(BATCH, 160)
    assert (first.is_measured_now, again.is_measured_now) == (True, False)
    assert (again.kind, again.reason, again.plan) == (first.kind, first.reason, first.plan)
    assert again.candidates == first.candidates
    assert (first.candidates[0].tokens_per_second or 0) > 0
    strict = policy_of(model, text, **values | {"cache_quality_max_mean_kl": 0.0}).decide(BATCH, 160)
    assert "no kind that fits passes the gates: bf16: " in strict.reason  # limits are no part of what was measured
    changed = small("decoupled", **WIDE)
    with torch.no_grad():
        changed.embedder.token.weight[0, 0] += 1
    for form in (False, "graph"):  # eager here, whatever the word
        assert policy_of(model, text, **values, compiled=form).decide(BATCH, 160).plan == first.plan
    for other, more in (
        (changed, {}),
        (model, {"cache_plan": "refresh"}),
        (model, {"decode_local_window": 9}),
    ):
        with pytest.raises(pytest.fail.Exception, match="measured"):
            policy_of(other, text, **values | more).decide(BATCH, 160)
    with monkeypatch.context() as patched:
        patched.setattr(policy, "resolve_form", lambda *_: ("graph", None))  # as on CUDA
        with pytest.raises(pytest.fail.Exception, match="measured"):
            policy_of(model, text, **values).decide(BATCH, 160)
    (file,) = (home / "runtime_plans").iterdir()
    file.write_text(file.read_text()[:-30])
    with pytest.raises(ConfigError, match=r"cache-\w+\.json: not a plan of a cache .* cache_plan=refresh"):
        policy_of(model, text, **values).decide(BATCH, 160)


@pytest.mark.parametrize("name", ["file/plan.json", "folder"])
def test_a_plan_that_cannot_be_written_is_refused_before_anything_is_measured(
    model: Model, text: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(policy, "measure_quality", lambda *_: pytest.fail("measured"))
    named = {"cache_plan_path": str(tmp_path / name), "cache_plan": "refresh"}
    with pytest.raises(ConfigError, match=f"{name}: what is measured of a cache cannot be written there"):
        policy_of(model, text, **named).decide(BATCH, 160)


def test_without_proof_it_is_16_bits_with_the_reason(model: Model, text: Path) -> None:
    broken = small("decoupled", **WIDE)
    with torch.no_grad():
        broken.embedder.token.weight[5, 3] = torch.nan  # byte 5 is in no text, and in every softmax
    short = text.parent / "short.txt"
    short.write_text(text.read_text()[:100])
    cases = (
        (policy_of(model, None), TOKENS, "no held-out text was given; name cache_quality_text"),
        (policy_of(model, text), 128, "a cache of at most 128 tokens holds all of them in 16 bits"),
        (policy_of(model, short), TOKENS, "has 100 tokens, and a quantised cache keeps 128 in 16 bits"),
        (
            policy_of(broken, text, cache_budget_mb=0.2),
            TOKENS,
            "the NLL or the KL on held-out text is not finite",
        ),
    )
    for chosen, n_tokens, reason in cases:
        found = chosen.decide(BATCH, n_tokens)
        assert (found.kind, reason in found.reason) == ("bf16", True), found.reason
    assert policy_of(small("decoupled").half(), None).decide(BATCH, TOKENS).kind == "fp16"
    nan = Quality(0.0, 1.0, 0.0, 1.0, float("nan"), 1.0, 1.0)
    assert nan.failures(GenerateConfig()) == ("needle KL nan > 0.05",)


def test_a_budget_that_nothing_fits_names_what_is_nearest(model: Model) -> None:
    sizes = {one.kind: one.nbytes for one in policy_of(model, None).decide(2, 4096).candidates}
    least = min(sizes, key=lambda kind: sizes[kind])
    text = rf"2 rows of 4096 tokens take at least {sizes[least] / 1e6:.4g} MB \({least.value}\)"
    with pytest.raises(ConfigError, match=text):
        policy_of(model, None, cache_budget_mb=sizes[least] / 1e6 * 0.99).decide(2, 4096)
    with pytest.raises(ConfigError, match=r"only bf16 may be used \(no held-out text"):
        policy_of(model, None, cache_budget_mb=sizes[least] / 1e6 * 1.01).decide(2, 4096)


def test_the_smallest_of_the_fastest_is_taken() -> None:
    good = Quality(0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0)
    lost = Quality(0.0, 1.0, 0.0, 1.0, 0.0, 0.8, 1.0)
    config = GenerateConfig()

    def one(kind: KVCacheKind, size: int, speed: float | None, quality: Quality = good) -> FormatCandidate:
        return FormatCandidate(kind, size, True, quality, speed, quality.failures(config))

    bf16 = KVCacheKind.BF16
    rows = [(bf16, 100, 100.0), (Q8, 50, 91.0), (Q4, 25, 89.0)]
    assert choose(tuple(one(*row) for row in rows), bf16, "", config)[0] is Q8
    assert choose(tuple(one(*row[:2], None) for row in rows), bf16, "", config)[0] is Q4
    kind, reason = choose(tuple(one(*row, lost) for row in rows), bf16, "", config)
    assert kind is bf16
    assert "q4_0: needle recall 80% < 100%" in reason


def test_needles_are_hidden_at_their_depths_in_the_text(text: Path) -> None:
    tokenizer = ByteTokenizer()
    held_out = EvalText.of_file(str(text), tokenizer, 257)
    assert held_out.tokens is not None
    keys = set()
    for needle in make_needles(held_out.tokens, LENGTH, tokenizer):
        row = tokenizer.decode(needle.tokens)
        before, after, asked = row.split("\nThe pass key is")
        keys.add(asked)
        assert len(needle.tokens) == LENGTH
        assert after == f"{asked}. Remember it.\n" + after[len(asked) + len(". Remember it.\n") :]
        assert needle.key == len(asked) == 6
        assert len(before) == round(needle.depth * (LENGTH - 2 * (16 + 6) - 15))
        assert before in text.read_text()
    assert len(keys) == 5
    for needle in make_needles(held_out.tokens, LENGTH, None):
        ids = list(needle.tokens)
        assert any(ids[at : at + 9] == ids[-9:] for at in range(LENGTH - 17))
    ids_of_others = text.parent / "ids.tokens"
    ids_of_others.write_text("1 2 999")
    with pytest.raises(DataError, match="the model has"):
        EvalText.of_file(str(ids_of_others), None, 257)
    with pytest.raises(ConfigError, match="name a token folder or a UTF-8 text file"):
        EvalText.of_file("nowhere.txt", tokenizer, 257)


def test_a_probe_that_fails_goes_on_in_16_bits(model: Model, text: Path, home: Path) -> None:
    strict: dict[str, Any] = QUICK | {
        "cache_quality_text": str(text),
        "cache_quality_max_mean_kl": 1e-9,
        "temperature": 0.0,
    }
    strict |= {
        "cache_budget_mb": 0.045,
        "max_new_tokens": 6,
        "cache_plan_probe": True,
        "cache_plan_probe_interval_sec": 0.0,
    }
    prompt = ByteTokenizer().encode(text.read_text()[:154])
    policy_of(model, text, cache_budget_mb=0.045).decide(BATCH, 160)  # of bf16 and q4_0
    (file,) = (home / "runtime_plans").iterdir()
    plan = json.loads(file.read_text())
    for kind, one in plan["kinds"].items():  # as another text would have it
        one["quality"] |= {"mean_kl": 0.0, "needle_kl": 0.0} if kind == "q4_0" else {"mean_kl": 99.0}
    file.write_text(json.dumps(plan))
    generator = Generator(model, ByteTokenizer(), **strict)
    (row,) = generator.generate([prompt])
    decision = generator.cache_decision
    assert decision is not None
    assert (decision.kind, generator.stats.cache_kind) == ("q4_0", "bf16")
    (probe,) = decision.probes
    assert (probe["at"], probe["passes"], probe["then"]) == (154, False, "went on with bf16")
    first = [*prompt, row.tokens[0]]
    (rest,) = Generator(model, max_new_tokens=5, temperature=0.0, cache_kind="bf16").generate([first])
    assert row.tokens[1:] == rest.tokens
    assert row.logprobs[1:] == pytest.approx(rest.logprobs, abs=0.02)
    strict["cache_quality_max_mean_kl"] = 9.0
    kept = Generator(model, ByteTokenizer(), **strict)
    kept.generate([prompt])
    assert kept.cache_decision is not None
    assert [found["passes"] for found in kept.cache_decision.probes] == [True] * 5


def test_what_every_row_was_fed_is_its_prompt_and_then_its_draws() -> None:
    prompts, drawn = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]]), torch.tensor([[7, 8, 9], [10, 11, 12]])
    fed = fed_tokens(prompts, torch.tensor([2, 4]), drawn, 5)
    assert fed.tolist() == [[1, 2, 7, 8, 9], [3, 4, 5, 6, 10]]


def test_a_decode_plan_changes_memory_and_only_a_named_window_the_text(model: Model) -> None:
    masked = small("window")
    prompt = list(range(20))
    for one in (model, masked):
        own = [(layer.score.q_chunk, layer.score.window) for _, layer in one.attention_layers()]
        values: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0}
        plans: tuple[dict[str, Any], ...] = (
            {},
            {"decode_plan": "fixed", "decode_q_chunk": 3},
            {"decode_local_window": 2},
        )
        plain, fixed, local = (Generator(one, **values, **more).generate([prompt])[0].logprobs for more in plans)
        assert fixed == pytest.approx(plain, abs=1e-4)
        assert local != pytest.approx(plain, abs=1e-3)
        assert [(layer.score.q_chunk, layer.score.window) for _, layer in one.attention_layers()] == own
    for n_tokens, q_chunk in ((2048, None), (2049, 2048), (16385, 1024), (65537, 512)):
        with planned(masked, GenerateConfig(), n_tokens) as found:
            assert found == {"q_chunk": q_chunk, "local_window": None}
        with planned(model, GenerateConfig(), n_tokens) as found:
            assert found["q_chunk"] is None
    with (
        pytest.raises(ConfigError, match="which a window would hide"),
        planned(small("latent_first"), GenerateConfig(decode_local_window=4), 9),
    ):
        pass


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cache_budget_mb": 3.0}, "cache_budget_mb is of cache_kind=auto, got cache_kind=None"),
        (
            {"cache_kind": "q8", "cache_plan_probe": True},
            "cache_plan_probe is of cache_kind=auto, got cache_kind=q8_0",
        ),
        ({"cache_kind": "auto", "cache_budget_mb": 0.0}, "cache_budget_mb: got 0.0, expected greater than 0"),
        ({"decode_plan": "fixed"}, "fixed goes with a decode_q_chunk"),
        ({"decode_q_chunk": 8}, "a decode_q_chunk with fixed"),
    ],
)
def test_keys_without_a_use_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_as(GenerateConfig, values)
