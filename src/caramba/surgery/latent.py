"""Surgery for `layout: latent`: one latent that all heads read as semantic key and as value, and shared rotary keys.

With y = [k_s; v], k_s the keys' position-free residual rotated by its mean rotation, S_g = sum_i E[q_i q_i^T] / D and
E_g = sum_i W_O,i^T W_O,i over the heads i of key/value head g: PCA of [S_g^1/2 k_s ; beta E_g^1/2 v]. The inverses go
into the query maps and the value expansion; the value mean becomes the output bias, the key mean drops out. With
first tokens that stay exact it does not: their scores lose what centring took from the others', q . mean.

Multi-head latent attention (`mla`) has no biases: there c = y @ latent, of the second moment of [k_s; v] in which the
keys' mean is taken out by the direction b of y with b . y = 1 in the least squares. A norm follows that is nearly
linear, for a latent of mean square 1. Its geometric frequencies are the student's grid, not the teacher's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caramba.layer import AttentionLayer
from caramba.surgery.algebra import DAMPING, Geometry, leading, symmetric_roots
from caramba.surgery.collect import LayerStatistics, bias_of, standard_projection

SINK_WEIGHT = 0.1
"""Weight of the attention sink next to the mean over all tokens. It is one token in thousands but draws much of the
attention; the moments of all tokens alone leave its key out of a narrow latent."""


@dataclass(frozen=True)
class LatentMaps:
    """A latent layer in terms of its teacher's queries, keys and values, float64; heads in K groups.

    c = (y - mean) @ latent, k_geo = k @ geometry.key, q_sem = q @ query, v = c @ value + the value mean; scores lack
    q . key_mean, with `key_mean` [K, D] in the teacher's own scale. The geometric pairs turn by `frequencies`
    [1, geo_dim / 2]. With `norm_eps` c is normalised, and the means are zero.
    """

    geometry: Geometry
    mean: Tensor
    latent: Tensor
    query: Tensor
    value: Tensor
    energies: Tensor
    beta: float
    key_mean: Tensor
    frequencies: Tensor
    norm_eps: float | None = None

    @property
    def rank(self) -> int:
        return self.latent.shape[1]

    @property
    def energy(self) -> float:
        """The share of the joint variance that the latent keeps."""
        return float(self.energies[: self.rank].sum() / self.energies.sum().clamp_min(1e-300))

    def normalize(self, c: Tensor) -> Tensor:
        """Return the latent after its norm, if it has one."""
        if self.norm_eps is None:
            return c
        weight = c.new_full((c.shape[-1],), norm_weight(self.norm_eps))
        return torch.nn.functional.rms_norm(c, (c.shape[-1],), weight, self.norm_eps)

    def truncate(self, rank: int) -> "LatentMaps":
        """Return the maps of a narrower latent: its directions are the leading ones of this."""
        return replace(self, latent=self.latent[:, :rank], query=self.query[..., :rank], value=self.value[:, :rank])


def norm_weight(eps: float) -> float:
    """Return the weight with which the norm leaves a latent of mean square 1 its size."""
    return (1.0 + eps) ** 0.5


def output_gram(layer: AttentionLayer) -> Tensor:
    """Return W_O,i^T W_O,i of every head, [H, Dv, Dv] float64."""
    heads = layer.out.weight.double().unflatten(1, (layer.dims.n_heads, -1)).transpose(0, 1)
    return heads.transpose(1, 2) @ heads


def latent_maps(
    layer: AttentionLayer,
    statistics: LayerStatistics,
    geometry: Geometry,
    queries: Tensor,
    rank: int,
    beta: float,
    norm_eps: float | None = None,
    frequencies: Tensor | None = None,
    sink: Tensor | None = None,
) -> LatentMaps:
    """Return the maps of a `rank`-wide latent for the keys that `geometry` leaves and the values.

    With `norm_eps` they are those of multi-head latent attention. Without `frequencies` the geometric pairs keep the
    teacher's. `sink` is [k; v] of the token that much attention goes to, and counts SINK_WEIGHT times.
    """
    dims = layer.dims
    kv_heads, width = dims.n_kv_heads, dims.qk
    factor = _attention_factor(layer) ** 2
    grams = queries.unflatten(0, (kv_heads, -1)).sum(1) * (factor**2 / width)
    outputs = output_gram(layer).unflatten(0, (kv_heads, -1)).sum(1) * beta**2
    key_root, key_inverse = symmetric_roots(grams)
    value_root, value_inverse = symmetric_roots(outputs)
    n = kv_heads * width
    into = torch.block_diag(geometry.residual @ torch.block_diag(*key_root), *value_root)
    mean = statistics.mean
    moment, total = statistics.moment, mean
    if sink is not None:
        moment, total = moment + SINK_WEIGHT * torch.outer(sink, sink), total + SINK_WEIGHT * sink
    if norm_eps is None:
        second = statistics.covariance
        if sink is not None:
            second = second + SINK_WEIGHT * torch.outer(sink - mean, sink - mean)
    else:
        into = _without_key_mean(moment, total, mean, n) @ into
        mean, second = torch.zeros_like(mean), moment
    basis, energies = leading(into.T @ second @ into, rank)
    query = torch.einsum("kde,ker->kdr", key_inverse, basis[:n].unflatten(0, (kv_heads, -1))) * factor
    value = torch.einsum("kde,ker->krd", value_inverse, basis[n:].unflatten(0, (kv_heads, -1)))
    key_mean = (mean[:n] @ geometry.residual).unflatten(0, (kv_heads, -1)) * factor
    latent = into @ basis
    if norm_eps is not None:
        size = (latent * (statistics.moment @ latent)).sum() / rank
        size = size.clamp_min(torch.finfo(energies.dtype).tiny).sqrt()
        latent, query, value = latent / size, query * size, value * size
    if frequencies is None:
        rope = standard_projection(layer).rope
        assert rope is not None
        frequencies = rope.inv_freq[:, geometry.pairs]
    return LatentMaps(geometry, mean, latent, query, value, energies, beta, key_mean, frequencies, norm_eps)


def _without_key_mean(moment: Tensor, total: Tensor, mean: Tensor, n_keys: int) -> Tensor:
    """Return the map y -> y - (b . y) [key mean; 0], with b . y = 1 in the least squares, [K (D + Dv), K (D + Dv)].

    No query sees a constant that all keys share, so only values have to carry their mean. `moment` and `total` are the
    weighted sums of y y^T and of y.
    """
    values, vectors = torch.linalg.eigh(moment)
    inverse = values.clamp_min(values[-1] * DAMPING).reciprocal()
    one = vectors @ (inverse * (vectors.T @ total))
    keys = torch.zeros_like(mean)
    keys[:n_keys] = mean[:n_keys]
    return torch.eye(len(one), dtype=one.dtype, device=one.device) - torch.outer(one, keys)


def latent_state(
    layer: AttentionLayer,
    maps: LatentMaps,
    student_factor: float,
    *,
    has_bias: bool,
    keeps_first: bool = False,
) -> dict[str, Tensor]:
    """Return the weights of a latent attention layer by name, float64.

    `student_factor` is what the student's rotary table multiplies queries and keys by (YaRN), as the teacher's may.
    With `has_bias` queries and geometric keys carry the teacher's biases; the latent and the output always do, except
    under `mla`, which has the norm's weight instead and computes its frequencies.
    `keeps_first` adds the teacher's own keys and values, which the first tokens keep.
    """
    projection, dims = standard_projection(layer), layer.dims
    rope = projection.rope
    assert rope is not None
    group = dims.n_heads // dims.n_kv_heads
    w_k, w_v = projection.k.weight.double(), projection.v.weight.double()
    n = len(w_k)
    offset = torch.cat((bias_of(projection.k), bias_of(projection.v)))
    geo_factor = (rope.attention_factor / student_factor) ** 2
    state = {
        "projection.q.weight": projection.q.weight.double(),
        "projection.c.weight": maps.latent.T @ torch.cat((w_k, w_v)),
        "projection.c.bias": (offset - maps.mean) @ maps.latent,
        "projection.k_geo.weight": maps.geometry.key.T @ w_k,
        "projection.q_sem_map": maps.query.repeat_interleave(group, 0),
        "projection.q_geo_map": maps.geometry.query.repeat_interleave(group, 0) * geo_factor,
        "projection.v_up": maps.value.repeat_interleave(group, 0),
        "projection.rope.inv_freq": maps.frequencies.double(),
        "out.weight": layer.out.weight.double(),
        "out.bias": _output_bias(layer, maps.mean[n:]),
    }
    if maps.norm_eps is not None:
        for name in ("projection.c.bias", "projection.rope.inv_freq", "out.bias"):
            del state[name]
        weight = maps.mean.new_full((maps.rank,), norm_weight(maps.norm_eps))
        return state | {"projection.c_norm.weight": weight}
    if has_bias:
        state["projection.q.bias"] = bias_of(projection.q)
        state["projection.k_geo.bias"] = offset[:n] @ maps.geometry.key
    if keeps_first:
        state |= {
            "projection.first.k.weight": w_k * geo_factor,
            "projection.first.v.weight": w_v,
            "projection.first.v.bias": offset[n:] - maps.mean[n:],
            "projection.first.key_mean": maps.key_mean,
            "projection.first.rope.inv_freq": rope.inv_freq,
        }
        if has_bias:
            state["projection.first.k.bias"] = offset[:n] * geo_factor
    return state


def _output_bias(layer: AttentionLayer, value_mean: Tensor) -> Tensor:
    """Return the output's bias with what the values' mean [K Dv] adds to every token."""
    dims = layer.dims
    mean = value_mean.unflatten(0, (dims.n_kv_heads, dims.v)).repeat_interleave(dims.n_heads // dims.n_kv_heads, 0)
    return bias_of(layer.out) + layer.out.weight.double() @ mean.flatten()


def _attention_factor(layer: AttentionLayer) -> float:
    rope = standard_projection(layer).rope
    assert rope is not None
    return rope.attention_factor
