"""Metric keys: one grammar, read and written by one function each."""

from __future__ import annotations

import pytest

from caramba.artifacts.key import MetricKey, as_word, parse_key
from caramba.errors import CarambaError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("perplexity.teacher.nll", ("perplexity", "teacher", "nll", {})),
        (
            "latency.student.tok_s@prompt=128,gen=32,batch=1",
            ("latency", "student", "tok_s", {"prompt": 128, "gen": 32, "batch": 1}),
        ),
        (
            "memory.student.kv_bytes_per_token@seq=256,kind=q8_0",
            ("memory", "student", "kv_bytes_per_token", {"seq": 256, "kind": "q8_0"}),
        ),
        ("verify.compare.logits_mean_l1", ("verify", None, "compare.logits_mean_l1", {})),
        ("ratio.tok_s@prompt=1,gen=2,batch=3", ("ratio", None, "tok_s", {"prompt": 1, "gen": 2, "batch": 3})),
        ("ratio.perplexity@model=student_global", ("ratio", None, "perplexity", {"model": "student_global"})),
        ("accuracy.student.arc.easy@shots=007", ("accuracy", "student", "arc.easy", {"shots": "007"})),
    ],
)
def test_keys_go_round(text: str, parts: tuple[str, str | None, str, dict[str, int | str]]) -> None:
    key = parse_key(text)
    assert (key.family, key.model, key.field, key.conditions) == parts
    assert key.format() == str(key) == text
    assert parse_key(key.format()) == key


def test_the_order_of_conditions_is_kept_but_does_not_tell_keys_apart() -> None:
    one, other = (
        parse_key("latency.student.tok_s@prompt=1,gen=2"),
        parse_key("latency.student.tok_s@gen=2,prompt=1"),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.format() != other.format()
    assert MetricKey("memory", "student", "peak_bytes", {"seq": "64"}) == parse_key("memory.student.peak_bytes@seq=64")


@pytest.mark.parametrize(
    "text",
    ["", "perplexity", "perplexity.teacher", "perplexity..nll", "latency.s.t@", "latency.s.t@prompt", "latency.s.t@a=1,a=2",
     "latency.s.t@a=", "latency.s.t@a=1=2", "a.b.c d", "ratio.", "verify."],
)  # fmt: skip
def test_a_malformed_key_is_refused_with_its_shape(text: str) -> None:
    with pytest.raises(CarambaError, match=r"FAMILY\.MODEL\.FIELD@NAME=VALUE"):
        parse_key(text)


def test_parts_may_not_hold_separators_and_a_ratio_has_no_model() -> None:
    with pytest.raises(CarambaError, match="holds a separator"):
        MetricKey("memory", "student", "peak_bytes", {"kind": "a,b"})
    with pytest.raises(CarambaError, match="'ratio' with model 'student'"):
        MetricKey("ratio", "student", "perplexity")
    with pytest.raises(CarambaError, match="'latency' with model None"):
        MetricKey("latency", None, "tok_s")
    assert parse_key(f"a.b.c@bench={as_word('my bench, v=2@x')}").conditions == {"bench": "my_bench_v_2_x"}
