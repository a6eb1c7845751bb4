"""The algebra of surgery on one layer's statistics, in float64.

A rotary pair of a head is one complex number (rotate-half: x_p + i x_{p+P}), and a row vector k [K D] is kept head by
head, so complex maps over the heads of one frequency p become real maps [K D, .] by `to_real`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.surgery.collect import LayerStatistics

DAMPING = 1e-9


@dataclass(frozen=True)
class Geometry:
    """The rotating part of a layer: n kept components, as maps of a row vector of keys and of a head's query.

    Attributes:
        key: [K D, 2n], the cached geometric key is k @ key.
        query: [K, D, 2n], its query is q @ query of the query's key/value head.
        residual: [K D, K D], what is left, rotated by its mean rotation: k @ residual.
        pairs: the frequency index of each component, [n].
        energy: the share of the position-dependent cost that the components carry.
    """

    key: Tensor
    query: Tensor
    residual: Tensor
    pairs: Tensor
    energy: float


@dataclass(frozen=True)
class Grid:
    """Frequencies of a student whose rotary grid is given, `ours` [n], and its teacher's, `theirs` [P]; both fall."""

    ours: Tensor
    theirs: Tensor


def mean_rotations(rotation: Tensor, grid: Grid) -> Tensor:
    """Return the mean rotation of each head at the differences of both grids' frequencies, [P, n, K] complex.

    The mean of exp(i w d) over the distances d that a head attends to is known at the teacher's frequencies w. Between
    them, and from the slowest down to w = 0, where it is 1, it is interpolated.

    Shape: rotation [P, K].
    """
    difference = grid.theirs[:, None] - grid.ours
    known = torch.cat((grid.theirs.new_zeros(1), grid.theirs.flip(0)))
    means = torch.cat((torch.ones_like(rotation[:1]), rotation.flip(0)))
    size = difference.abs().clamp_max(known[-1])
    above = torch.searchsorted(known, size).clamp(1, len(known) - 1)
    low, high = known[above - 1], known[above]
    share = ((size - low) / (high - low))[..., None]
    mean = means[above - 1] * (1 - share) + means[above] * share
    return torch.where(difference[..., None] < 0, mean.conj(), mean)


def nearest_pairs(grid: Grid, n_kv_heads: int) -> Tensor:
    """Return 1 where a teacher's pair is nearest to a student's frequency, else 0.

    It replaces `mean_rotations` where no attention is known. Shape: [P, n, K] complex.
    """
    distance = (grid.theirs.log()[:, None] - grid.ours.log()).abs()
    nearest = distance == distance.min(0).values
    return nearest[..., None].expand(-1, -1, n_kv_heads).to(torch.complex128)


def match_grid(saved: Tensor) -> Tensor:
    """Return for each frequency of a grid a component of its own, [n], by the largest savings first.

    Shape: saved [components, n].
    """
    left, order = saved.clone(), torch.zeros(saved.shape[1], dtype=torch.long, device=saved.device)
    for _ in range(saved.shape[1]):
        component, place = divmod(int(left.argmax()), saved.shape[1])
        order[place] = component
        left[component], left[:, place] = -1.0, -1.0
    return order


def symmetric_roots(gram: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """Return G^1/2 and G^-1/2 of positive semidefinite matrices [..., n, n], eigenvalues floored at `damping` of the
    largest."""
    values, vectors = torch.linalg.eigh(gram)
    floor = values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny) * damping
    values = torch.maximum(values, floor)
    transposed = vectors.transpose(-1, -2)
    return (vectors * values.sqrt()[..., None, :]) @ transposed, (vectors * values.rsqrt()[..., None, :]) @ transposed


def leading(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the `rank` leading eigenvectors [..., n, rank] of symmetric matrices and all eigenvalues, descending."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors.flip(-1)[..., :rank], values.flip(-1).clamp_min(0)


def key_moments(statistics: LayerStatistics, n_kv_heads: int) -> Tensor:
    """Return Z_p = E[k_p k_p^H] over the key/value heads, [P, K, K] complex, from the real second moment."""
    pairs = statistics.rotation.shape[1]
    n = n_kv_heads * 2 * pairs
    blocks = statistics.moment[:n, :n].reshape(n_kv_heads, 2, pairs, n_kv_heads, 2, pairs)
    same = blocks.diagonal(dim1=2, dim2=5)  # [K, 2, K, 2, P]
    real = same[:, 0, :, 0] + same[:, 1, :, 1]
    imaginary = same[:, 1, :, 0] - same[:, 0, :, 1]
    return torch.complex(real, imaginary).permute(2, 0, 1)


def query_energy(queries: Tensor, n_kv_heads: int) -> Tensor:
    """Return w_{g,p}, the sum over heads i of group g of E|q_{i,p}|^2, [K, P], from E[q q^T] [H, D, D]."""
    energy = queries.diagonal(dim1=1, dim2=2).unflatten(-1, (2, -1)).sum(1)
    return energy.unflatten(0, (n_kv_heads, -1)).sum(1)


def to_real(maps: Tensor) -> Tensor:
    """Return the real matrix [K D, J D] of complex-linear maps over heads: for each p, out_j = sum_g k_g maps[p, g, j].

    Shape: maps [P, K, J] complex -> [K 2P, J 2P].
    """
    pairs, heads, out = maps.shape
    real = maps.real.new_zeros(heads, 2, pairs, out, 2, pairs)
    index = torch.arange(pairs, device=maps.device)
    # Separated by slices, the indexed dimensions come first: each part below is [P, K, J].
    for row, column, part in ((0, 0, maps.real), (1, 1, maps.real), (0, 1, maps.imag), (1, 0, -maps.imag)):
        real[:, row, index, :, column, index] = part
    return real.reshape(heads * 2 * pairs, out * 2 * pairs)


def select_geometry(
    statistics: LayerStatistics,
    queries: Tensor,
    geo_dim: int,
    n_kv_heads: int,
    *,
    turns: bool = True,
    grid: Grid | None = None,
) -> Geometry:
    """Choose the geo_dim / 2 components that cost most to un-rotate, over all frequencies, and split the keys by them.

    Per frequency p, with D_p = diag(w_p)^1/2: eigh(D_p Z_p D_p) = U L U^H. Complex-linear mixing across the heads of
    one frequency commutes with RoPE. Un-rotating component j costs L_j (1 - sum_g |U_gj|^2 |rho_g|^2); with
    `turns=False` (no attention is known) it costs L_j, and the residual loses its rotation instead of being rotated by
    the mean one.

    With a `grid` each of the student's frequencies takes the component that it serves best, see `match_grid`.

    Shape: queries [H, D, D], the second moments that weigh the pairs.
    """
    pairs = statistics.rotation.shape[1]
    weights = query_energy(queries, n_kv_heads).T  # [P, K]
    scale = weights.clamp_min(weights.max().clamp_min(1e-300) * DAMPING).sqrt()
    moments = key_moments(statistics, n_kv_heads)
    values, basis = torch.linalg.eigh(scale[:, :, None] * moments * scale[:, None, :])
    values = values.clamp_min(0)
    rotation = statistics.rotation.T if turns else torch.ones_like(statistics.rotation.T)  # [P, K]
    cost = values
    if turns:
        cost = values * (1 - torch.einsum("pgj,pg->pj", basis.abs() ** 2, rotation.abs() ** 2)).clamp_min(0)
    count, served = geo_dim // 2, None
    if grid is None:
        order = cost.flatten().argsort(descending=True, stable=True)[:count].sort().values
        carried = cost.flatten()[order]
    else:
        served = mean_rotations(rotation, grid) if turns else nearest_pairs(grid, n_kv_heads)
        left = 1 - torch.einsum("pgj,png->pjn", basis.abs() ** 2, served.abs() ** 2)
        saved = (cost[..., None] - values[..., None] * left).clamp_min(0).flatten(0, 1)
        order = match_grid(saved)
        carried = saved[order, torch.arange(count, device=saved.device)]
    chosen, component = order // n_kv_heads, order % n_kv_heads
    kept = torch.zeros_like(cost).flatten()
    kept[order] = 1.0
    kept = kept.view_as(cost)
    vectors = basis[chosen, :, component].T  # [K, n]
    at = scale[chosen].T  # [K, n]
    into, read = vectors.conj() * at, vectors.conj() / at
    if served is not None:
        read = read * served[chosen, torch.arange(count, device=chosen.device)].T
    split = torch.einsum("pgj,pj,phj->pgh", basis.conj(), kept.to(basis.dtype), basis)
    split = split * (scale[:, :, None] / scale[:, None, :])
    rest = (torch.eye(n_kv_heads, dtype=split.dtype, device=split.device) - split) * rotation.conj()[:, None, :]
    total = cost.sum().clamp_min(1e-300)
    return Geometry(
        _component_map(into, chosen, pairs).flatten(0, 1),
        _component_map(read, chosen, pairs),
        to_real(rest),
        chosen,
        float(carried.sum() / total),
    )


def _component_map(coefficients: Tensor, chosen: Tensor, pairs: int) -> Tensor:
    """Return the real map [K, D, 2n] of k -> k_{g, p_i} c_{g,i}, rotate-half in and out; coefficients [K, n]."""
    heads, n = coefficients.shape
    real = coefficients.real.new_zeros(heads, 2, pairs, 2, n)
    column = torch.arange(n, device=chosen.device)
    for row, out, part in (
        (0, 0, coefficients.real),
        (1, 1, coefficients.real),
        (0, 1, coefficients.imag),
        (1, 0, -coefficients.imag),
    ):
        real[:, row, chosen, out, column] = part
    return real.reshape(heads, 2 * pairs, 2 * n)


def head_blocks(matrix: Tensor, heads: int) -> Tensor:
    """Return the diagonal blocks [K, n, n] of a matrix [K n, K n]."""
    blocks = matrix.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
