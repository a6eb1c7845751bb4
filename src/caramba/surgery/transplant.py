"""Teacher to student: copy what both have, initialise each converted attention, report every weight."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.config.surgery import check_pair
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, DecoupledProjection, StandardProjection
from caramba.model import Model, build_model, pair_attention
from caramba.result import TransplantedLayer, TransplantReport
from caramba.surgery.algebra import symmetric_roots
from caramba.surgery.budget import fit_widths
from caramba.surgery.calibration import Calibration
from caramba.surgery.collect import weight_statistics
from caramba.surgery.dba import convert, describe, load_layer
from caramba.surgery.sensitivity import HeldOutKL, fit_budget


@dataclass(frozen=True)
class Factors:
    """Low-rank factors of one key/value head: rows of the cached map, queries' counterparts, and the energy kept."""

    cached: Tensor
    counterpart: Tensor
    energy: float


def low_rank(weight: Tensor, gram: Tensor, rank: int) -> Factors:
    """Factor x^T weight h as (counterpart @ x)^T (cached @ h), optimal for x of Gram `gram`.

    Shape: weight [n, M], gram [n, n] -> cached [rank, M], counterpart [rank, n]. Rows beyond n are zero.
    """
    n = weight.shape[0]
    cached = weight.new_zeros(rank, weight.shape[1])
    counterpart = weight.new_zeros(rank, n)
    if n == 0:
        return Factors(cached, counterpart, 1.0)
    root, inverse = symmetric_roots(gram)
    values, vectors = torch.linalg.eigh(root @ weight @ weight.T @ root)
    keep = min(rank, n)
    basis = vectors.flip(1)[:, :keep]
    cached[:keep] = basis.T @ root @ weight
    counterpart[:keep] = basis.T @ inverse
    energy = values.flip(0).clamp_min(0)
    return Factors(cached, counterpart, float(energy[:keep].sum() / energy.sum().clamp_min(1e-300)))


def select_pairs(q: Tensor, k: Tensor, count: int) -> Tensor:
    """Return the sorted indices of the `count` rotary pairs with the largest product of norms.

    Shape: q [g, D, M] query heads of one key/value head, k [D, M]; D = 2P in rotate-half order -> [count].
    """
    q_energy = q.pow(2).sum(dim=(0, 2)).view(2, -1).sum(0)
    k_energy = k.pow(2).sum(dim=1).view(2, -1).sum(0)
    return (q_energy * k_energy).topk(count).indices.sort().values


@torch.no_grad()
def weight_svd(teacher: AttentionLayer, student: AttentionLayer) -> float:
    """Initialise a decoupled `per_head` student layer from a standard or GQA teacher layer; return the energy kept."""
    t, s = teacher.dims, student.dims
    group, width = t.n_heads // t.n_kv_heads, t.qk
    source, target = teacher.projection, student.projection
    assert isinstance(source, StandardProjection)
    assert isinstance(target, DecoupledProjection)
    assert source.rope is not None
    assert target.rope is not None
    frequencies = source.rope.inv_freq.reshape(-1, width // 2)[0]
    w_q = source.q.weight.double().view(t.n_kv_heads, group, width, -1)
    w_k = source.k.weight.double().view(t.n_kv_heads, width, -1)
    w_v = source.v.weight.double().view(t.n_kv_heads, t.v, -1)
    w_o = teacher.out.weight.double().view(-1, t.n_kv_heads, group, t.v)
    by_name = {name: size for name, _, size in s.streams}
    sem, geo, v = by_name["k_sem"], by_name["k_geo"], by_name["v"]
    fold = (s.qk / width) ** 0.5  # teacher scores carry width^-1/2, the student's carry (sem + geo)^-1/2
    turned = source.rope.attention_factor**2  # the semantic path has no rotary table to carry it
    turned_again = turned / target.rope.attention_factor**2  # what the student's own table does not carry
    pairs = width // 2
    out = {name: [] for name in ("q_sem", "q_geo", "k_sem", "k_geo", "v", "o", "inv_freq")}
    energies = []
    for head in range(t.n_kv_heads):
        chosen = select_pairs(w_q[head], w_k[head], geo // 2)
        rows = torch.cat([chosen, chosen + pairs])
        rest = torch.tensor(
            [row for row in range(width) if row not in set(rows.tolist())],
            dtype=torch.long,
            device=rows.device,
        )
        q_rest = w_q[head][:, rest]
        keys = low_rank(w_k[head][rest], torch.einsum("grm,gsm->rs", q_rest, q_rest), sem)
        values = low_rank(w_v[head], torch.einsum("mgd,mge->de", w_o[:, head], w_o[:, head]), v)
        out["k_sem"].append(keys.cached)
        out["q_sem"].append(torch.einsum("rs,gsm->grm", keys.counterpart, q_rest) * (fold * turned))
        out["k_geo"].append(w_k[head][rows])
        out["q_geo"].append(w_q[head][:, rows] * (fold * turned_again))
        out["v"].append(values.cached)
        out["o"].append(torch.einsum("mgd,rd->mgr", w_o[:, head], values.counterpart))
        out["inv_freq"].append(frequencies[chosen])
        energies += [keys.energy, values.energy]
    for name in ("q_sem", "q_geo", "k_sem", "k_geo", "v"):
        weight = getattr(target, name).weight
        weight.copy_(torch.stack(out[name]).reshape(weight.shape))
    student.out.weight.copy_(torch.stack(out["o"], dim=1).reshape(student.out.weight.shape))
    target.rope.inv_freq.copy_(torch.stack(out["inv_freq"]))
    return sum(energies) / len(energies)


def copy_heads(teacher: AttentionLayer, student: AttentionLayer) -> TransplantedLayer:
    """Initialise a GQA layer of K' key/value heads: each is the mean of K / K' of its teacher's; the rest is copied.

    Reference: Ainslie et al., 2023, arXiv:2305.13245, section 2.1.
    """
    source = teacher.projection
    assert isinstance(source, StandardProjection)
    kv_heads = student.dims.n_kv_heads

    def pool_heads(value: Tensor) -> Tensor:
        heads = value.double().unflatten(0, (kv_heads, teacher.dims.n_kv_heads // kv_heads, -1))
        return heads.mean(1).flatten(0, 1)

    state = {
        name: pool_heads(value) if name.startswith(("projection.k.", "projection.v.")) else value
        for name, value in teacher.state_dict().items()
    }
    load_layer(student, state)
    return describe(student.config, teacher.config)


CALIBRATED = ("dba",)  # methods that need the teacher's activations


def check_models(teacher: Model, student: Model, surgery: SurgeryConfig) -> None:
    """Check, without touching a weight, that `transplant` can make this student; it may be on the meta device.

    Raises:
        ConfigError: the models do not pair, a part is not mapped by the method, or a weight has no counterpart.
    """
    _check_shared(teacher, student, set(_converted(teacher, student, surgery)))


def _converted(
    teacher: Model, student: Model, surgery: SurgeryConfig
) -> dict[str, tuple[AttentionLayer, AttentionLayer]]:
    pairs = pair_attention(teacher, student)
    found = {name: (source, target) for name, source, target in pairs if source.config != target.config}
    for source, target in found.values():
        check_pair(source.config, target.config, surgery)
    return found


@torch.no_grad()
def transplant(
    teacher: Model, student: Model, surgery: SurgeryConfig, calibration: Calibration | None = None
) -> TransplantReport:
    """Initialise `student` from `teacher` in place and account for every weight of both.

    Weights outside converted attention are copied by name. An attention layer whose config equals its teacher's is
    copied too; the others go through `surgery.method`. `dba` reads the teacher's `calibration`.

    Raises:
        ConfigError: a weight of the student has no counterpart, the models do not pair, a part is not mapped by the
            method, or calibration is missing. Nothing is changed then.
    """
    # By now every width is a layer's own.
    chosen = surgery.model_copy(update={"kv_budget_bytes": None, "kv_budget_formats": ()})
    converted = _converted(teacher, student, chosen)
    if converted and surgery.method in CALIBRATED and calibration is None:
        raise ConfigError(f"surgery.method={surgery.method}: needs the teacher's calibration, and none was made")
    copied, initialised = _copy_shared(teacher, student, set(converted))
    sources = {id(source) for source, _ in converted.values()}
    taken = {name + "." for name, layer in teacher.attention_layers() if id(layer) in sources}
    layers = [
        dataclasses.replace(_convert(surgery.method, source, target, calibration), name=name)
        for name, (source, target) in converted.items()
    ]
    is_taken = surgery.method != "random"
    return TransplantReport(
        method=surgery.method,
        copied=tuple(copied),
        initialised=tuple(initialised),
        unmapped_teacher=tuple(
            key for key in teacher.state_dict() if key not in copied and not (is_taken and key.startswith(tuple(taken)))
        ),
        energy_kept=tuple(layer.energy_kept for layer in layers if layer.energy_kept is not None),
        layers=tuple(layers),
        calibration_tokens=calibration.n_tokens if calibration is not None else 0,
    )


def _convert(
    method: str, source: AttentionLayer, target: AttentionLayer, calibration: Calibration | None
) -> TransplantedLayer:
    if method == "dba":
        assert calibration is not None
        return convert(source, target, *calibration.of(source))
    if method == "memory":  # the gates of the student are those of its seed
        target.load_state_dict(target.state_dict() | source.state_dict())
        return describe(target.config, source.config)
    if method == "copy":
        return copy_heads(source, target)
    if method == "weight_svd" and target.config.layout == "latent":
        return convert(source, target, weight_statistics(source), None)
    # Chance keeps nothing of a variance, so there is no share of it to report.
    energy = weight_svd(source, target) if method == "weight_svd" else None
    return describe(target.config, source.config, energy_kept=energy)


def _copy_shared(teacher: Model, student: Model, converted: set[str]) -> tuple[list[str], list[str]]:
    """Copy by name every weight outside the converted layers; return the names of the copied and of the others."""
    copied, initialised = _check_shared(teacher, student, converted)
    theirs, ours = teacher.state_dict(), student.state_dict()
    for key in copied:
        ours[key].copy_(theirs[key])
    return copied, initialised


def _check_shared(teacher: Model, student: Model, converted: set[str]) -> tuple[list[str], list[str]]:
    """Return the names of the weights to copy, each of which the teacher has in that shape, and of the others."""
    theirs, ours = teacher.state_dict(), student.state_dict()
    prefixes = tuple(name + "." for name in converted)
    initialised = [key for key in ours if key.startswith(prefixes)]
    copied = [key for key in ours if key not in set(initialised)]
    for key in copied:
        source, tensor = theirs.get(key), ours[key]
        if source is None or source.shape != tensor.shape:
            found = "nothing of that name" if source is None else f"shape {tuple(source.shape)}"
            raise ConfigError(
                f"model: the student's {key} has shape {tuple(tensor.shape)}, its teacher has {found}; "
                "outside attention a student's layers are its teacher's"
            )
    modules = dict(teacher.named_modules())
    for name, module in student.named_modules():
        wanted, found = getattr(modules.get(name), "eps", None), getattr(module, "eps", None)
        if not name.startswith(prefixes) and wanted != found:
            raise ConfigError(
                f"model: the student's {name} has eps={found}, its teacher's {wanted}; "
                "outside attention a student's layers are its teacher's"
            )
    return copied, initialised


def build_student(
    teacher: Model, config: ModelSpec, surgery: SurgeryConfig, calibration: Calibration | None, seed: int
) -> tuple[Model, TransplantReport]:
    """Build a student on the device of its teacher, with weights from it; widths follow `surgery.kv_budget_bytes`."""
    is_predicted = False
    if surgery.kv_budget_bytes is not None and calibration is not None:
        budget, formats = surgery.kv_budget_bytes, surgery.kv_budget_formats
        is_predicted = bool(formats)
        if formats:
            config = fit_budget(teacher, config, calibration, budget, formats)
        else:
            config = fit_widths(teacher, config, calibration, budget)
    student, report = _build(teacher, config, surgery, calibration, seed)
    if not is_predicted or calibration is None:
        return student, report
    kl = HeldOutKL.on(teacher, calibration).of(student)
    logger.info(f"kv_budget: predicted KL {kl:.4g} nats without training, on held-out calibration text")
    return student, dataclasses.replace(report, predicted_kl=kl)


def _build(
    teacher: Model, spec: ModelSpec, surgery: SurgeryConfig, calibration: Calibration | None, seed: int
) -> tuple[Model, TransplantReport]:
    weight = teacher.embedder.token.weight
    student = build_model(spec, seed=seed).to(weight.device).eval()
    return student, transplant(teacher, student, surgery, calibration)
