"""Two processes share each layer of one model: losses, gradients, weights and cached decode are those of one process."""

from __future__ import annotations

import datetime
import functools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torch.nn.functional import cross_entropy

from caramba.cache import DeviceContext
from caramba.cli import main
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError, Preempted
from caramba.evaluation.ladder import SharedRung, time_on_ranks
from caramba.infer import Generator
from caramba.infer.device_steps import step_refusal
from caramba.model import Model, build_model, save_model
from caramba.model.parallel import apply_tensor_parallel, full_state_dict, keep_local
from caramba.model.topology import checkpoint_topology, compilable_regions
from tests.integration.commands import caramba
from tests.preloaded import FORKS, forkserver, start_ranks
from tests.ranks import leave_together, meet
from tests.unit.model.model_specs import ATTENTION, MLP, NORM, VOCAB, M, attention, block, spec, transformer

TOKENS = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
PIECES = ((0, 3), (3, 4), (4, 7))
ONE_KEY = {
    "type": "AttentionLayer",
    "d_model": M,
    "mode": "gqa",
    "n_heads": 4,
    "n_kv_heads": 1,
    "null_attn": True,
}
WIRED = [
    {"type": "CyclicTopology", "layers": [block("decoupled")], "n_cycles": 2},
    {"type": "RecurrentTopology", "layers": [NORM, {**ONE_KEY, "qk_norm": True, "bias": True}], "steps": 2},
    {
        "type": "ParallelTopology",
        "layers": [attention("standard"), MLP, {"type": "LayerNormLayer", "d_model": M}],
    },
    {"type": "LinearLayer", "d_in": 3 * M, "d_out": M, "reduce": "concat", "bias": True},
]
SPECS: dict[str, ModelSpec] = {
    **{name: transformer(name, repeat=1) for name in ATTENTION},
    "wired": spec(*WIRED, max_positions=16, tied=False, bias=True),
    "even": spec(block("latent"), vocab_size=VOCAB + 1),
    "even_apart": spec(block("decoupled"), vocab_size=VOCAB + 1, tied=False, bias=True),
}


def built(name: str) -> Model:
    """Return the model of a name in float64, no weight left neutral."""
    model = build_model(SPECS[name], seed=1).double()
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=source, dtype=value.dtype), alpha=0.2)
    return model


def step(model: Model, tokens: torch.Tensor = TOKENS) -> tuple[float, dict[str, torch.Tensor]]:
    logits = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def generated(model: Model, **values: Any) -> list[tuple[int, ...]]:
    found = Generator(model, max_new_tokens=9, seed=3, **values).generate(TOKENS[:, :5].tolist())
    return [row.tokens for row in found]


def last_on_device(model: Model) -> torch.Tensor | None:
    """Return the logits of the last token from a step whose length the device counts, None where it is refused."""
    ctx = model.new_context(2, TOKENS.shape[1], static=True)
    if step_refusal(model, ctx) is not None:
        return None
    with torch.no_grad():
        model(TOKENS[:, :-1], ctx)
        step = DeviceContext(ctx)
        step.advance()
        return model(TOKENS[:, -1:], step)


def compared(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Compare this rank's share of a model with the whole model, run beside it."""
    alone, shared = built(name), apply_tensor_parallel(built(name), mesh)
    checkpoint_topology(shared.topology, "full" if name == "wired" else "none")
    loss, gradients = step(alone)
    shared_loss, shared_gradients = step(shared)
    apart = apply_tensor_parallel(built(name), mesh, split_sequence=True)
    apart_loss, apart_gradients = step(apart)
    with pytest.raises(
        ConfigError, match="2 ranks split sequences, got 5 tokens; expected a multiple of 2 and no cache"
    ):
        apart(TOKENS[:, :5])
    with pytest.raises(ConfigError, match="the model is split already"):
        apply_tensor_parallel(apart, mesh)
    served = apply_tensor_parallel(built(name), mesh, split_vocabulary=True)
    keep_local(served)
    ctx, other = (model.new_context(2, 7, static=True) for model in (served, alone))
    with torch.no_grad():
        pieces, others = ([one(TOKENS[:, a:b], own) for a, b in PIECES] for one, own in ((served, ctx), (alone, other)))
    ours, wanted = last_on_device(served), last_on_device(alone)
    return {
        "loss": abs(loss - shared_loss),
        "gradients": difference(whole(shared_gradients), gradients),
        "loss_by_sequence": abs(loss - apart_loss),
        "gradients_by_sequence": difference(whole(apart_gradients), gradients),
        "weights": difference(full_state_dict(shared), alone.state_dict()),
        "logits": float((torch.cat(pieces, 1) - torch.cat(others, 1)).abs().max()),
        "device_step": None if ours is None or wanted is None else float((ours - wanted).abs().max()),
        "split": sum(value.to_local().numel() for value in shared.parameters() if isinstance(value, DTensor)),
        "parameters": sum(value.numel() for value in alone.parameters()),
        "cache_share": ctx.nbytes() / other.nbytes(),
        "tokens": generated(served, temperature=0.9, top_k=11) == generated(alone, temperature=0.9, top_k=11),
    }


def compiled(mesh: DeviceMesh) -> dict[str, float]:
    """The gradients of compiled blocks, with a batch of one, whose tokens lie side by side already, beside eager ones.

    Without Inductor: what a compiler may lose of a gradient it loses before that.
    """
    apart = []
    for split_sequence in (False, True):
        found = []
        for compiles in (False, True):
            model = apply_tensor_parallel(built("standard"), mesh, split_sequence=split_sequence)
            regions = compilable_regions(model.topology) if compiles else []
            for region in regions:
                region.forward = torch.compile(region.forward, backend="eager", fullgraph=True)
            found.append(whole(step(model, TOKENS[:1])[1]))
        apart.append(difference(*reversed(found)))
    return dict(zip(("gradients", "gradients_by_sequence"), apart, strict=True))


def dropped(mesh: DeviceMesh) -> dict[str, Any]:
    """Attention dropout of a rank's heads, drawn while all ranks are seeded alike, as those of one layer are."""
    model = build_model(spec(attention("standard", dropout=0.5), attention("standard")), seed=1).double()
    apply_tensor_parallel(model, mesh)
    score, other, *_ = (getattr(layer, "score", None) for layer in model.topology.layers)
    assert score is not None
    assert other is not None
    q, k = torch.randn(2, 3, 2, 64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    kept = score(q, k, torch.ones_like(k))  # the sum of the probabilities that are kept, doubled
    again = score(q, k, torch.ones_like(k))
    follows = torch.rand(4)
    torch.manual_seed(5)
    repeated = score(q, k, torch.ones_like(k))
    gradients = []
    for mode in ("none", "full"):
        checkpoint_topology(model.topology, mode)
        torch.manual_seed(5)
        model.zero_grad()
        gradients.append(whole(step(model)[1]))
    states: list[Any] = [None] * mesh.size()
    dist.all_gather_object(states, (kept, follows, torch.get_rng_state()))
    (ours, after, state), (theirs, same, also) = states
    return {
        "apart": not torch.equal(ours, theirs) and not torch.equal(kept, again),
        "alike": torch.equal(after, same) and torch.equal(state, also),
        "repeats": torch.equal(kept, repeated),
        "recomputed": difference(*gradients),
        "mean": float(torch.cat((ours, theirs)).mean()),
        "is_plain": type(other).__name__,
        "evaluates": torch.equal(score.eval()(q, k, k), other.eval()(q, k, k)),
    }


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, 2, datetime.timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {**{name: compared(name, mesh) for name in SPECS}, "dropped": dropped(mesh)}
    found["compiled"] = compiled(mesh)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_together()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(rank_main, (str(folder),), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", SPECS)
def test_two_ranks_do_the_work_of_one(both: list[dict[str, dict[str, Any]]], name: str) -> None:
    for found in both:
        one = found[name]
        exact = ("loss", "gradients", "loss_by_sequence", "gradients_by_sequence")
        for key, limit in (*((key, 1e-12) for key in exact), ("logits", 1e-6)):  # the caches are float32
            assert one[key] < limit, (key, one[key])
        assert one["weights"] == 0
        if name.startswith("latent_first"):  # its first tokens are kept apart, which a step on the device refuses
            assert one["device_step"] is None
        else:
            assert one["device_step"] < 1e-6
        assert one["tokens"]
        assert one["split"] < one["parameters"]


def test_compiled_blocks_that_ranks_share_train_as_eager_ones(both: list[dict[str, dict[str, Any]]]) -> None:
    for found in both:
        assert max(found["compiled"].values()) < 1e-12


def test_heads_of_two_ranks_drop_other_probabilities(both: list[dict[str, dict[str, Any]]]) -> None:
    """Seeded alike, heads h and h + H/2 would drop the same ones; the stream that ranks share stays as it would be."""
    for found in both:
        one = found["dropped"]
        assert (one["apart"], one["alike"], one["repeats"], one["evaluates"]) == (True,) * 4, one
        assert one["recomputed"] == 0, "activation checkpointing drops the same again"
        assert one["mean"] == pytest.approx(1.0, abs=0.05)
        assert one["is_plain"] == "LocalCausalScore", "without dropout nothing is left out of compiled code"


def test_torchrun_generates_the_text_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(spec(block("latent"), block("decoupled"), vocab_size=258), seed=1)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4)
    save_model(model, tmp_path / "model.safetensors", role="student", phase="test", labels={})
    words = [
        "generate",
        "model.safetensors",
        "--tokenizer",
        "byte",
        "--device",
        "cpu",
        "--max-new-tokens",
        "12",
    ]
    words += ["--prompt", "def f", "--prompt", "a", "--seed", "5", "--json"]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    ranks = ["--nproc-per-node", "2", "-m", "caramba", *words]
    both = caramba(ranks, tmp_path, tmp_path, module="torch.distributed.run")
    assert both.returncode == 0, both.stderr
    shared = json.loads(both.stdout)  # one rank speaks
    assert [row["tokens"] for row in shared["rows"]] == [row["tokens"] for row in alone["rows"]]
    assert [row["text"] for row in shared["rows"]] == [row["text"] for row in alone["rows"]]
    assert 0.5 < shared["stats"]["cache_bytes"] / alone["stats"]["cache_bytes"] < 1, "the latent is on both ranks"


@pytest.fixture(name="ladder_ranks")
def _ladder_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ladder start its ranks as these tests start theirs."""
    if FORKS:
        forkserver()
        starts = functools.partial(start_processes, start_method="forkserver")
        monkeypatch.setattr("caramba.evaluation.ladder.spawn", starts)


@pytest.mark.usefixtures("ladder_ranks")
def test_the_last_rung_of_the_ladder_is_timed_by_two_ranks() -> None:
    generate = {"max_new_tokens": 4, "temperature": 0.0}
    rung = SharedRung("cpu", "float32", "reference", True, TOKENS.tolist(), 1, 2, generate)
    model = build_model(SPECS["even"], seed=1)
    found = time_on_ranks(model, rung)
    assert (found.ran, len(found.timed)) == ("eager", 2)
    assert all(seconds > 0 for pair in found.timed for seconds in pair)
    assert found.weight_bytes < 0.75 * sum(value.nbytes for value in model.parameters())


@pytest.mark.usefixtures("ladder_ranks")
def test_a_stop_ends_the_ranks_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: a run that was told to stop went on until its ranks had timed everything."""

    def stopped(_: object) -> bool:
        raise Preempted("SIGTERM")

    monkeypatch.setattr(ProcessContext, "join", stopped)
    rung = SharedRung("cpu", "float32", "reference", True, TOKENS.tolist(), 1, 2, {"max_new_tokens": 4})
    with pytest.raises(Preempted):
        time_on_ranks(build_model(SPECS["even"], seed=1), rung)
    assert multiprocessing.active_children() == []


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["graph", True])
def test_two_gpus_replay_graphs_of_a_shared_step(compiled: str | bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, {torch.cuda.device_count()} are here")
    generate = {"max_new_tokens": 16, "temperature": 0.0, "compiled": compiled}
    wide = {
        "type": "AttentionLayer",
        "d_model": 256,
        "n_heads": 8,
        "mode": "gqa",
        "n_kv_heads": 4,
        "head_dim": 64,
    }
    network = {
        "embedder": {"vocab_size": 512, "d_model": 256},
        "topology": {"type": "StackedTopology", "layers": [wide]},
    }
    rung = SharedRung("cuda", "bfloat16", "auto", False, [[1, 2, 3]], 1, 3, generate)
    found = time_on_ranks(build_model(ModelSpec.model_validate(network), seed=1), rung)
    assert found.ran == ("graph" if compiled == "graph" else "compiled graph")
