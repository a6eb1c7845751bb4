"""Plans by the forms of tensors: what counts as the same form, and what is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from caramba.kernels.triton import signature
from caramba.kernels.triton.signature import MOST_FORMS, MOST_SEEN, LaunchCache, tensor_signature


def test_a_form_is_all_but_the_place() -> None:
    x = torch.zeros(4, 6)
    assert tensor_signature(x) == tensor_signature(torch.ones(4, 6))
    assert len({tensor_signature(y) for y in (x, x.T, x[:3], x.double())}) == 4


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "looked up"])
def test_a_plan_is_found_for_tensors_of_its_forms_alone(is_seen: bool) -> None:
    plans: LaunchCache[str] = LaunchCache()
    x, y = torch.zeros(4, 6), torch.zeros(3, dtype=torch.int32)
    assert plans.get("rest", (x, y)) is None
    plans.add("rest", (x, y), "made")
    if not is_seen:
        plans.seen.clear()
    assert plans.get("rest", (torch.ones(4, 6), torch.ones(3, dtype=torch.int32))) == "made"
    others = (x[:3], x.T, x.double(), torch.zeros(4, 12)[:, ::2], torch.zeros(4, 6, 1), y)
    assert [plans.get("rest", (other, y)) for other in others] == [None] * len(others)
    assert plans.get("rest", (y, x)) is None
    assert plans.get("other", (x, y)) is None


def test_one_tensor_given_twice_is_looked_up() -> None:
    plans: LaunchCache[str] = LaunchCache()
    x = torch.zeros(4)
    plans.add(0, (x, torch.zeros(4)), "made")
    for _ in range(3):
        assert plans.get(0, (x, x)) == "made"
    assert len(plans.seen[0]) == 1, "what never says yes is not asked again"


def test_a_form_that_was_looked_up_is_seen_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: LaunchCache[str] = LaunchCache()
    x = torch.zeros(4)
    plans.add(0, (x,), "made")
    plans.seen.clear()
    assert plans.get(0, (x,)) == "made"
    monkeypatch.setattr(signature, "tensor_signature", None)
    assert plans.get(0, (x,)) == "made"


def test_a_plan_holds_no_tensor() -> None:
    plans: LaunchCache[str] = LaunchCache()
    x = torch.zeros(4)
    gone = weakref.ref(x)
    plans.add(0, (x,), "made")
    assert plans.get(0, (x,)) == "made"
    del x
    gc.collect()
    assert gone() is None


def test_plans_of_many_forms_are_bounded_and_right() -> None:
    plans: LaunchCache[int] = LaunchCache()
    for n in range(MOST_FORMS + 2):
        plans.add(n % 2, (torch.zeros(n),), n)
    assert len(plans.by_form) == 2, "all were forgotten when there were too many"
    for n in range(MOST_SEEN + 4):
        plans.add(0, (torch.zeros(n),), n)
    assert len(plans.seen[0]) == MOST_SEEN
    assert [plans.get(0, (torch.zeros(n),)) for n in range(MOST_SEEN + 4)] == list(range(MOST_SEEN + 4))
    for rest in range(MOST_FORMS):
        plans._see(rest, (torch.zeros(1),), 0)
    assert len(plans.seen) <= MOST_FORMS
