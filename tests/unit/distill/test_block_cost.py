"""What one block's step may cost: its matrix products, its copies and its largest tensors, counted as they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from caramba.config.layer import AttentionLayerConfig
from caramba.distill import BlockwiseObjective, attention_kl, sample_queries
from caramba.distill.block_loss import AttentionDivergence, BlockStep, attention_log_probabilities
from caramba.layer import AttentionLayer, LatentProjection, score
from caramba.lower.lowering import lower
from caramba.model import build_model
from caramba.surgery import pair_attention
from tests.unit.surgery.test_weight_svd import TOKENS, spec

M, HEADS, WIDTH, LATENT, GEO, B, T = 64, 4, 16, 32, 8, 2, 48
FIELDS: dict[str, Any] = {"d_model": M, "n_heads": HEADS, "head_dim": WIDTH}
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def student_of(**fields: Any) -> AttentionLayer:
    torch.manual_seed(0)
    latent = {"mode": "decoupled", "layout": "latent", "sem_dim": LATENT, "geo_dim": GEO}
    return AttentionLayer(AttentionLayerConfig.model_validate({**FIELDS, **latent, **fields}))


def teacher_of() -> AttentionLayer:
    torch.manual_seed(1)
    config = AttentionLayerConfig.model_validate({**FIELDS, "mode": "gqa", "n_kv_heads": 2})
    return AttentionLayer(config).requires_grad_(False)


def features(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(B, T, M, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


class Counted(TorchDispatchMode):
    """Counts the ops on tensors of at least [B, T, M] elements, gradients of single rows or halves whatever their size,
    and the largest tensor that any op made."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if not func.is_view:
            self.largest = max([self.largest, *sizes])
            name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
            if max(sizes, default=0) >= B * T * M or name == "select_backward":
                self.ops[name] += 1
        return out


class FusedAttention(torch.autograd.Function):
    """In place of the fused ops of a GPU what they do with memory: the output has its queries' order, gradients that
    of their inputs, and an output's gradient in another order than the output would be copied."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        out = q[..., : v.shape[-1]] + v
        ctx.strides = out.stride()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        assert grads[0].stride() == ctx.strides, "the gradient of the output would be copied"
        q, k, v = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def run_step(layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], float]:
    """Return the counts of one step under bf16 autocast and its matrix FLOPs per token, without attention's own."""

    monkeypatch.setattr(score.F, "scaled_dot_product_attention", lambda q, k, v, **_: FusedAttention.apply(q, k, v))
    monkeypatch.setattr(score, "_widen", lambda x, width: x)
    x, target = features(), features()
    with (
        lower(layer, "cpu", "train"),
        torch.autocast(**BF16),
        Counted() as counted,
        FlopCounterMode(display=False) as flops,
    ):
        _, raw, size = BlockStep(layer)(x, target)
        (raw / size).backward()
    return counted.ops, flops.get_total_flops() / (B * T)


def test_a_latent_blocks_step_makes_no_product_or_copy_beyond_those_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = HEADS * WIDTH
    q, out, c, k_geo = (2 * M * n for n in (width, width, LATENT, GEO))
    expansion, geo_map = 2 * LATENT * width, 2 * width * GEO
    forward = q + out + c + k_geo + 2 * expansion + geo_map
    # Backward: no gradient of x, so products of x with a weight have that weight's only; all others have both.
    backward = q + c + k_geo + 2 * out + 2 * (2 * expansion) + 2 * geo_map
    ops, flops = run_step(student_of(), monkeypatch)
    assert flops == forward + backward
    # One copy: the semantic part of the keys' gradient, which its product reads as a matrix.
    assert ops["clone"] == 1, ops
    assert ops["cat"] == 2, "queries and keys are joined once"
    assert not ops["select_backward"], "no gradient of half a tensor is padded with zeros to a whole one"
    kept = student_of()
    kept.projection.q.requires_grad_(False)  # type: ignore[union-attr]
    kept.out.weight.requires_grad_(False)
    _, fewer = run_step(kept, monkeypatch)
    assert fewer == flops - q - out - geo_map, "two weights' gradients, and that of the queries"


def test_trainable_maps_trains_what_surgery_made_and_nothing_else() -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(spec(mode="decoupled", layout="latent", sem_dim=10, geo_dim=4), seed=2)
    pairs = pair_attention(teacher, student)
    objective = BlockwiseObjective(student, teacher, pairs, keeps_copied=True)
    trained = dict(objective.trainable())
    ends = {key.split("attention.")[-1].removeprefix(f"{pairs[0][0]}.") for key in trained if pairs[0][0] in key}
    latent = {"c.weight", "c.bias", "k_geo.weight", "q_sem_map", "q_geo_map", "v_up"}
    assert ends == {"out.bias", *(f"projection.{name}" for name in latent)}
    for parameter in student.parameters():
        parameter.requires_grad_(any(parameter is one for one in trained.values()))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    batch = (TOKENS[:, :-1], TOKENS[:, 1:])
    first = objective.evaluate(batch)["loss"]
    for _ in range(20):
        objective.step(batch, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()
    assert objective.evaluate(batch)["loss"] < 0.8 * first
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(trained)
    assert [len(group) for group in objective.clip_groups()] == [7, 7]


def test_sampled_rows_ask_as_all_rows_do() -> None:
    rows = sample_queries(torch.zeros(B, T), 7)
    assert rows.shape == (B, 7)
    assert all(len(set(each.tolist())) == 7 for each in rows)
    assert sample_queries(torch.zeros(B, 5), 7).shape == (B, 5)
    gates = {"decoupled_gate": True, "decoupled_gate_dynamic": True, "learned_temperature": True}
    per_head = {"layout": "per_head", "sem_dim": 16, "geo_dim": 16, "v_dim": 32, "rope_semantic": True}
    layers = [teacher_of(), student_of(**gates), student_of(**per_head), student_of(**per_head, tie_qk=True)]
    offsets: list[int | Tensor] = [0, torch.arange(T).flip(0).expand(B, -1)]
    x = features(torch.float64)
    for layer in layers:
        for offset in offsets:
            all_q, streams = layer.double().projection(x, offset)
            q, same = layer.projection(x, offset, rows)
            expected = all_q.gather(2, rows[:, None, :, None].expand(-1, HEADS, -1, all_q.shape[-1]))
            torch.testing.assert_close(q, expected, rtol=0, atol=1e-12)
            assert all(torch.equal(streams[name], same[name]) for name in streams)


def test_a_latent_students_attention_kl_is_the_definition_and_reaches_maps_and_keys() -> None:
    teacher, student, x = teacher_of().double(), student_of().double(), features(torch.float64)
    with torch.no_grad():  # away from zero, so that every gradient shows
        for parameter in (*teacher.parameters(), *student.parameters()):
            parameter.normal_(std=0.3)
    rows = sample_queries(torch.zeros(B, T), 9)
    projection = student.projection
    assert isinstance(projection, LatentProjection)
    q, streams = projection(x)
    scores = q @ projection.keys_values(streams)[0].mT
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    expected = scores.masked_fill(~causal, -torch.inf).log_softmax(-1)
    at = rows[:, None, :, None].expand(-1, HEADS, -1, T)
    torch.testing.assert_close(attention_log_probabilities(student, x, rows), expected.gather(2, at))
    loss = attention_kl(teacher, student, x, x, rows)
    assert loss > 0.01
    loss.backward()
    reached = {name for name, p in student.named_parameters() if p.grad is not None and bool(p.grad.any())}
    maps = ("q.weight", "c.weight", "k_geo.weight", "q_sem_map", "q_geo_map")
    assert {f"projection.{name}" for name in maps} <= reached
    assert not reached & {"projection.v_up", "out.weight", "out.bias"}


def test_attention_kl_holds_no_square_of_the_sequence_and_compiles_in_one_graph() -> None:
    teacher, student, x = teacher_of(), student_of(), features()
    rows = sample_queries(torch.zeros(B, T), 3)
    with torch.autocast(**BF16):
        exact = attention_kl(teacher.double(), student.double(), x.double(), x.double(), rows)
        teacher, student = teacher.float(), student.float()
        with Counted() as counted, FlopCounterMode(display=False) as flops:
            eager = AttentionDivergence()(teacher.bfloat16(), student, x, x, rows)
            eager.backward()
        assert counted.largest <= max(B * HEADS * 3 * T, B * T * M), "scores of sampled queries, and features"
        assert counted.largest < B * HEADS * T * T // 4
        torch.testing.assert_close(eager.double(), exact, rtol=0.1, atol=1e-4)
        graphs: list[object] = []
        compiled = torch.compile(
            AttentionDivergence().forward,
            backend=lambda graph, _: graphs.append(graph) or graph,
            fullgraph=True,
        )
        for other in (student, student_of(), student_of()):  # equal blocks share a graph
            torch.testing.assert_close(compiled(teacher, other, x, x, rows), attention_kl(teacher, other, x, x, rows))
    assert len(graphs) == 1
    # Both layers' queries of 3 rows of 48, keys of all, and 3 rows of scores: far below one forward of the student.
    with FlopCounterMode(display=False) as whole, torch.autocast(**BF16):
        student(x).sum().backward()
    assert flops.get_total_flops() < 0.5 * whole.get_total_flops()
