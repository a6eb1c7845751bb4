"""Surgery for `layout: per_head`: every key/value head has rotary pairs, a semantic key and a value of its own.

Per key/value head g, with S_g = sum_i E[q_i q_i^T]: the pairs costliest to un-rotate, w_p E|k_p|^2 (1 - |rho_p|^2),
keep their rotation; the others get their mean rotation, and PCA of S_g^1/2 k_s gives the semantic key. Values
take the PCA of E_g^1/2 v, centred where the output has a bias to hold the mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.layer import AttentionLayer
from caramba.surgery.algebra import head_blocks, leading, query_energy, symmetric_roots
from caramba.surgery.collect import LayerStatistics, standard_projection
from caramba.surgery.latent import output_gram


@dataclass(frozen=True)
class PerHeadMaps:
    """A per-head layer in terms of its teacher's queries, keys and values, float64, one map per key/value head.

    Attributes:
        pairs: frequency index of each kept pair, [K, n].
        key, query: k_sem = k @ key and q_sem = q @ query, each [K, D, r].
        value, expansion: v = v_t @ value [K, Dv, rv], expanded by [K, rv, Dv].
        constant: what the expansion of the mean leaves out, [K, Dv]; zero when values are not centred.
        energy: shares kept of semantic and of value variance, in the metric of the errors they cause.
    """

    pairs: Tensor
    key: Tensor
    query: Tensor
    value: Tensor
    expansion: Tensor
    constant: Tensor
    energy: tuple[float, float]

    @property
    def rows(self) -> Tensor:
        """Indices of the kept features of each head's key and query, rotate-half, [K, 2n]."""
        return torch.cat((self.pairs, self.pairs + self.key.shape[1] // 2), -1)


def per_head_maps(
    layer: AttentionLayer,
    statistics: LayerStatistics,
    queries: Tensor,
    widths: tuple[int, int, int],
    *,
    centres_values: bool,
) -> PerHeadMaps:
    """Return the maps for semantic, geometric and value widths per key/value head."""
    dims = layer.dims
    kv_heads, width = dims.n_kv_heads, dims.qk
    sem, geo, rank = widths
    n = kv_heads * width
    rotation = statistics.rotation
    energy = head_blocks(statistics.moment[:n, :n], kv_heads).diagonal(dim1=1, dim2=2).unflatten(-1, (2, -1)).sum(1)
    cost = query_energy(queries, kv_heads) * energy * (1 - rotation.abs() ** 2).clamp_min(0)
    chosen = cost.argsort(dim=-1, descending=True, stable=True)[:, : geo // 2].sort(-1).values
    left = torch.ones_like(cost).scatter(1, chosen, 0.0)
    turn = _rotations(rotation.conj() * left)
    key, query, kept_keys = _factors(
        queries.unflatten(0, (kv_heads, -1)).sum(1),
        turn.transpose(1, 2) @ head_blocks(statistics.covariance[:n, :n], kv_heads) @ turn,
        sem,
    )
    moment = statistics.covariance if centres_values else statistics.moment
    outputs = output_gram(layer).unflatten(0, (kv_heads, -1)).sum(1)
    value, counterpart, kept_values = _factors(outputs, head_blocks(moment[n:, n:], kv_heads), rank)
    mean = statistics.mean[n:].unflatten(0, (kv_heads, -1)) * float(centres_values)
    expansion = counterpart.transpose(1, 2)
    constant = mean - (mean[:, None] @ value @ expansion)[:, 0]
    return PerHeadMaps(chosen, turn @ key, query, value, expansion, constant, (kept_keys, kept_values))


def _rotations(turns: Tensor) -> Tensor:
    """Return the real maps [K, D, D] of k_p -> k_p turns_p for complex turns [K, P]."""
    real, imaginary = torch.diag_embed(turns.real), torch.diag_embed(turns.imag)
    return torch.cat((torch.cat((real, imaginary), -1), torch.cat((-imaginary, real), -1)), -2)


def _factors(gram: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return cached and counterpart maps [K, n, rank] best for readers of Gram `gram`, and the share they keep.

    Columns beyond n are zero.
    """
    root, inverse = symmetric_roots(gram)
    basis, energies = leading(root @ moment @ root, rank)
    missing = rank - basis.shape[-1]
    basis = torch.nn.functional.pad(basis, (0, missing)) if missing > 0 else basis
    kept = float(energies[..., :rank].sum() / energies.sum().clamp_min(1e-300))
    return root @ basis, inverse @ basis, kept


def per_head_state(
    layer: AttentionLayer, maps: PerHeadMaps, student_factor: float, *, has_bias: bool, has_out_bias: bool
) -> dict[str, Tensor]:
    """Return the weights of a decoupled per-head layer by name, float64, its score scale folded into the queries."""
    projection, dims = standard_projection(layer), layer.dims
    rope = projection.rope
    assert rope is not None
    kv_heads, group, width = dims.n_kv_heads, dims.n_heads // dims.n_kv_heads, dims.qk
    rows = maps.rows
    fold = ((maps.key.shape[-1] + rows.shape[-1]) / width) ** 0.5
    turned = rope.attention_factor**2
    readers = rows.repeat_interleave(group, 0)
    w_o = layer.out.weight.double().unflatten(1, (dims.n_heads, dims.v))

    def parts(name: str) -> dict[str, Tensor]:
        """Return the student's tensors from the teacher's weights [., M] or biases, taken as one more column."""
        q, k, v = (_columns(linear, name) for linear in (projection.q, projection.k, projection.v))
        q = q.unflatten(0, (dims.n_heads, width))
        k = k.unflatten(0, (kv_heads, width))
        v = v.unflatten(0, (kv_heads, dims.v))
        q_sem = maps.query.repeat_interleave(group, 0).transpose(1, 2) @ q * (fold * turned)
        q_geo = _take(q, readers) * (fold * turned / student_factor**2)
        found = {
            "q_sem": q_sem,
            "q_geo": q_geo,
            "k_sem": maps.key.transpose(1, 2) @ k,
            "k_geo": _take(k, rows),
            "v": maps.value.transpose(1, 2) @ v,
        }
        return {f"projection.{key}.{name}": _flat(value, name) for key, value in found.items()}

    state = parts("weight")
    expansion = maps.expansion.repeat_interleave(group, 0)  # [H, rv, Dv]
    state["out.weight"] = torch.einsum("mhd,hrd->mhr", w_o, expansion).flatten(1)
    state["projection.rope.inv_freq"] = rope.inv_freq.double()[0][maps.pairs]
    if has_bias:
        state |= parts("bias")
    if has_out_bias:
        constant = maps.constant.repeat_interleave(group, 0)
        state["out.bias"] = torch.einsum("mhd,hd->m", w_o, constant)
        if layer.out.bias is not None:
            state["out.bias"] = state["out.bias"] + layer.out.bias.double()
    return state


def _columns(linear: torch.nn.Linear, name: str) -> Tensor:
    if name == "weight":
        return linear.weight.double()
    bias = linear.bias
    return (linear.weight.new_zeros(len(linear.weight), 1) if bias is None else bias[:, None]).double()


def _flat(value: Tensor, name: str) -> Tensor:
    flat = value.flatten(0, 1)
    return flat if name == "weight" else flat[:, 0]


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))
