"""Surgery from weights: exact at full width, better than random below it, and every weight accounted for."""

from __future__ import annotations

import pytest
import torch

from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.distill import block_errors
from caramba.errors import ConfigError
from caramba.model import Model, build_model
from caramba.surgery import pair_attention, transplant
from caramba.surgery.algebra import symmetric_roots
from caramba.surgery.transplant import low_rank, select_pairs

M, HEADS, KV, DIM = 32, 4, 2, 8


def spec(**attention: object) -> ModelSpec:
    node = {
        "type": "AttentionLayer",
        "d_model": M,
        "n_heads": HEADS,
        "n_kv_heads": KV,
        "head_dim": DIM,
        "mode": "gqa",
    } | attention
    block = [
        {"type": "ResidualTopology", "layers": [{"type": "RMSNormLayer", "d_model": M}, node]},
        {
            "type": "ResidualTopology",
            "layers": [
                {"type": "RMSNormLayer", "d_model": M},
                {"type": "SwiGLULayer", "d_model": M, "d_ff": 48},
            ],
        },
    ]
    layers = [
        {"type": "NestedTopology", "repeat": 2, "layers": block},
        {"type": "RMSNormLayer", "d_model": M},
    ]
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 40, "d_model": M},
            "topology": {"type": "StackedTopology", "layers": layers},
        }
    )


def student_spec(sem: int, geo: int, v: int, **extra: object) -> ModelSpec:
    return spec(mode="decoupled", sem_dim=sem, geo_dim=geo, v_dim=v, **extra)


def loud(model: Model) -> Model:
    """Weights large enough that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12.0)
    return model


@pytest.fixture
def teacher() -> Model:
    return loud(build_model(spec(), seed=3)).eval()


TOKENS = torch.randint(40, (3, 17), generator=torch.Generator().manual_seed(1))


def test_full_geometric_width_reproduces_the_teacher(teacher: Model) -> None:
    student = build_model(student_spec(KV, KV * DIM, KV * DIM), seed=9).eval()
    report = transplant(teacher, student, SurgeryConfig(method="weight_svd"))
    torch.testing.assert_close(student(TOKENS), teacher(TOKENS), atol=1e-4, rtol=1e-4)
    assert report.energy_kept == pytest.approx([1.0, 1.0])


def test_the_teachers_rotary_factor_is_kept_whatever_the_students_table() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    teacher = loud(build_model(spec(rope_scaling=yarn), seed=3)).double().eval()
    for scaling in (yarn, None):
        student = build_model(student_spec(2, 16, 16, rope_scaling=scaling), seed=9).double().eval()
        transplant(teacher, student, SurgeryConfig(method="weight_svd"))
        torch.testing.assert_close(student(TOKENS), teacher(TOKENS), rtol=1e-5, atol=1e-5)


def test_semantic_width_is_exact_without_rotation() -> None:
    base = 1e30  # every frequency but the first is 0, so un-rotating the others changes nothing
    teacher = loud(build_model(spec(rope_base=base), seed=3)).eval()
    for (
        _,
        layer,
    ) in teacher.attention_layers():  # make the one pair that turns the loudest, so that it is kept
        for weight in (layer.projection.q.weight, layer.projection.k.weight):
            weight.data.view(-1, DIM, M)[:, [0, DIM // 2]] *= 3
    student = build_model(student_spec(KV * (DIM - 2), KV * 2, KV * DIM, rope_base=base), seed=9).eval()
    transplant(teacher, student, SurgeryConfig(method="weight_svd"))
    assert student.attention_layers()[0][1].projection.rope.inv_freq.flatten().tolist() == [1.0] * KV
    torch.testing.assert_close(student(TOKENS), teacher(TOKENS), atol=1e-3, rtol=1e-3)


def test_error_falls_with_width_and_beats_random(teacher: Model) -> None:
    def error(method: str, sem: int, geo: int, v: int) -> float:
        student = build_model(student_spec(sem, geo, v), seed=9).eval()
        transplant(teacher, student, SurgeryConfig(method=method))
        errors = block_errors(teacher, pair_attention(teacher, student), TOKENS)
        return sum(errors) / len(errors)

    svd = [error("weight_svd", *widths) for widths in ((4, 4, 4), (4, 8, 8), (4, 12, 12), (2, 16, 16))]
    assert svd == sorted(svd, reverse=True)
    assert svd[-1] < 1e-4
    assert svd[1] < error("random", 4, 8, 8)


def test_low_rank_is_the_best_approximation_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    readers = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    factors = low_rank(weight, readers.T @ readers, 3)
    product = readers @ weight
    found = readers @ factors.counterpart.T @ factors.cached
    singular = torch.linalg.svdvals(product)
    torch.testing.assert_close((product - found).pow(2).sum(), singular[3:].pow(2).sum())
    assert factors.energy == pytest.approx(float(singular[:3].pow(2).sum() / singular.pow(2).sum()))


def test_damped_roots_of_a_singular_matrix_are_finite() -> None:
    root, inverse = symmetric_roots(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64)))
    assert torch.isfinite(inverse).all()
    torch.testing.assert_close(root[0, 0], torch.tensor(2.0, dtype=torch.float64))


def test_pairs_are_chosen_by_both_norms() -> None:
    q, k = torch.zeros(1, 8, 3), torch.zeros(8, 3)
    q[0, :, 0] = torch.tensor([1.0, 9, 2, 0, 1, 9, 2, 0])
    k[:, 0] = torch.tensor([1.0, 0, 2, 9, 1, 0, 2, 9])
    assert select_pairs(q, k, 2).tolist() == [0, 2]


def test_every_weight_is_accounted_for(teacher: Model) -> None:
    student = build_model(student_spec(4, 8, 8), seed=9)
    report = transplant(teacher, student, SurgeryConfig(method="weight_svd"))
    assert set(report.copied) | set(report.initialised) == set(student.state_dict())
    assert not set(report.copied) & set(report.initialised)
    assert report.unmapped_teacher == ()
    random = transplant(teacher, build_model(student_spec(4, 8, 8), seed=9), SurgeryConfig(method="random"))
    assert [layer.energy_kept for layer in random.layers] == [None, None], "a share that nobody measured is no 0"
    assert len(random.unmapped_teacher) == len(teacher.state_dict()) - len(random.copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 8}, r"\(d_model, heads\) \(32, 8\), the teacher \(32, 4\)"),
        ({"bias": True}, "the student's bias is not mapped"),
        ({"local_window": 4}, "local_window is 4 in the student, None in the teacher"),
    ],
)
def test_what_cannot_be_mapped_is_refused(teacher: Model, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transplant(teacher, build_model(student_spec(4, 8, 8, **change), seed=9), SurgeryConfig(method="weight_svd"))


def test_more_rotary_width_than_the_teacher_has_is_refused(teacher: Model) -> None:
    with pytest.raises(ConfigError, match="geo_dim=32 is wider than the teacher, which has 16; use at most 16"):
        transplant(teacher, build_model(student_spec(4, 32, 8), seed=9), SurgeryConfig(method="weight_svd"))


@pytest.mark.parametrize("bias", [True, "qkv"])
def test_weight_svd_of_a_biased_teacher_is_exact_at_sufficient_rank(bias: object) -> None:
    """A latent of d_model + 1 holds keys and values of any features and their biases; it erred by 0.3."""
    from tests.unit.surgery.models import latent_spec, make_teacher

    wide = {"n_kv_heads": 4, "head_dim": 2 * DIM, "bias": bias}  # 64 values of a token from 32 features
    teacher = make_teacher(**wide)
    student = build_model(latent_spec(M + 1, 8 * DIM, **wide), seed=1).double().eval()
    transplant(teacher, student, SurgeryConfig(method="weight_svd"))
    tokens = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(2))
    assert max(block_errors(teacher, pair_attention(teacher, student), tokens)) < 1e-9
