"""Surgery from the weights alone: the baseline against which activation-aware surgery is measured.

Per key/value head g, with teacher queries W_q,i (heads i of g), keys W_k and values W_v:

- geometric: the rotary pairs p with the largest (sum_i |W_q,i,p|^2)^(1/2) |W_k,p| keep their rotation and the
  teacher's own frequency (selection rule of MHA2MLA, Ji et al., 2025, arXiv:2502.14837);
- semantic: the other pairs lose their rotation; with S = sum_i W_q,i W_q,i^T and C = W_k W_k^T over those rows,
  eigh(S^1/2 C S^1/2) = U L U^T gives k_sem = U_r^T S^1/2 W_k and q_sem,i = U_r^T S^-1/2 W_q,i;
- values: the same with E = sum_i W_o,i^T W_o,i in place of S, the inverse absorbed into W_o.

Everything is computed in float64. The student's score scale is folded into its queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.layer import AttentionLayer, DecoupledProjection, StandardProjection
from caramba.surgery.algebra import symmetric_roots


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
