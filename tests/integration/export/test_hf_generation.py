"""Generation by transformers from an exported folder: padded prompts, and caches that go on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from caramba.config.estimate import model_cost
from caramba.config.kvcache import KVCacheKind
from caramba.infer import greedy
from tests.integration.export.samples import REMOTE, TOLERANCE, exported, loud, make_run, tokens

transformers = pytest.importorskip("transformers")


def padded(prompts: list[torch.Tensor], fill: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [T_i] padded on the left to one length, with their mask."""
    width = max(map(len, prompts))
    rows = [torch.cat((torch.full((width - len(row),), fill), row)) for row in prompts]
    mask = [(torch.arange(width) >= width - len(row)).long() for row in prompts]
    return torch.stack(rows), torch.stack(mask)


@pytest.mark.parametrize("name", ["dba", "first tokens"])
def test_prompts_padded_on_the_left_are_scored_and_continued_as_each_alone(tmp_path, name):
    """Greedy, beams, with and without a cache; two of the prompts are equally long and share one."""
    model = loud(REMOTE[name])
    folder = exported(tmp_path, make_run(tmp_path, model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    prompts = [tokens()[0, :length] for length in (5, 12)] + [tokens()[1, :5], tokens()[1, :1]]
    batch, mask = padded(prompts)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = theirs(batch, attention_mask=mask).logits
        plain = theirs(batch, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, plain, atol=TOLERANCE, rtol=0)
        for row, prompt in zip(logits, prompts, strict=True):
            expected = model(prompt[None])[0]
            torch.testing.assert_close(row[-len(prompt) :], expected, atol=TOLERANCE, rtol=0)
        done = theirs.generate(batch, attention_mask=mask, return_dict_in_generate=True, **options)
        uncached = theirs.generate(batch, attention_mask=mask, use_cache=False, **options)
        beams = theirs.generate(batch, attention_mask=mask, num_beams=3, **options)
        for at, prompt in enumerate(prompts):
            alone = greedy(model, prompt[None], 8)[0, -8:]
            assert torch.equal(done.sequences[at, -8:], alone)
            assert torch.equal(uncached[at, -8:], alone)
            assert torch.equal(beams[at, -8:], theirs.generate(prompt[None], num_beams=3, **options)[0, -8:])
    stored = sum(len(prompt) + 7 for prompt in prompts)  # padding is not cached, nor the last new token
    per_token = model.new_context(1, 1, static=True).bytes_per_token
    first = len(prompts) * model_cost(model.spec).first_bytes(KVCacheKind.FP32)
    assert done.past_key_values.used_bytes() == stored * per_token + first
    labels = batch.masked_fill(mask == 0, -100)
    loss = theirs.train()(batch, attention_mask=mask, labels=labels).loss
    each = [F.cross_entropy(model(row[None])[0, :-1], row[1:], reduction="sum") for row in prompts]
    torch.testing.assert_close(loss, sum(each) / sum(len(row) - 1 for row in prompts), atol=1e-5, rtol=0)


def test_a_generation_goes_on_from_the_cache_of_an_earlier_one(tmp_path):
    model = loud(REMOTE["dba"])
    folder = exported(tmp_path, make_run(tmp_path, model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    batch, mask = padded([tokens()[0, :6], tokens()[1, :11]])
    first = theirs.generate(batch, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **options)
    mask = torch.cat((mask, mask.new_ones(2, 5)), dim=1)
    past = first.past_key_values
    after = theirs.generate(first.sequences, attention_mask=mask, past_key_values=past, max_new_tokens=30, **options)
    for row, prompt in zip(after, (tokens()[0, :6], tokens()[1, :11]), strict=True):
        assert torch.equal(row[-35:], greedy(model, prompt[None], 35)[0, -35:])
    per_token = model.new_context(1, 1, static=True).bytes_per_token
    assert past.allocated_bytes() == per_token * (40 + 45)  # all but the last new token, and nothing spare
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, which stores other tensors"):
        theirs(batch, past_key_values=transformers.DynamicCache())
    full = theirs(tokens(), use_cache=False).logits
    for kept, places in ((torch.tensor([3, 7]), [3, 7]), (2, [38, 39]), (0, range(40))):
        some = theirs(tokens(), use_cache=False, logits_to_keep=kept).logits
        torch.testing.assert_close(some, full[:, list(places)], atol=1e-5, rtol=0)


def test_padding_that_tokens_would_see_is_refused(tmp_path):
    folder = exported(tmp_path, make_run(tmp_path, loud(REMOTE["dba"])))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    hole, left = torch.ones(2, 40, dtype=torch.long), torch.ones(2, 40, dtype=torch.long)
    hole[0, 3:5], left[0, :3] = 0, 0
    places = torch.arange(40).expand(2, 40)
    with torch.no_grad():
        for mask, text in (
            (hole, "pad prompts on the left"),
            (left.flip(1), "pad prompts on the left"),
            (0 * left, "padding alone"),
        ):
            with pytest.raises(ValueError, match=text):
                theirs(tokens(), attention_mask=mask)
        with pytest.raises(ValueError, match="position_ids are"):
            theirs(tokens(), attention_mask=left, position_ids=places)
        with pytest.raises(ValueError, match=r"attention_mask is \[2, 39\]"):
            theirs(tokens(), attention_mask=left[:, 1:])
        past = theirs(tokens()).past_key_values
        with pytest.raises(ValueError, match="differs from that of the cached"):
            theirs(tokens()[:, :1], attention_mask=torch.cat((left, left[:, -1:]), 1), past_key_values=past)
        right = theirs(tokens(), attention_mask=left.flip(1), use_cache=False).logits
        torch.testing.assert_close(right, theirs(tokens(), use_cache=False).logits)
    with pytest.raises(ValueError, match="cache_implementation"):
        theirs.generate(tokens(), max_new_tokens=2, cache_implementation="static")


def test_a_model_in_float64_is_told_that_caches_hold_less(tmp_path):
    folder = exported(tmp_path, make_run(tmp_path, loud(REMOTE["dba"])))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval().double()
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"the model is in torch.float64, a cache holds .*use_cache=False"):
            theirs(tokens())
        assert theirs(tokens(), use_cache=False).logits.dtype == torch.float64
