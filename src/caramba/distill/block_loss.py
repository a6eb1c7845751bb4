"""How far a student's attention is from its teacher's on the same input, and a layer with that distance as one step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.layer import AttentionLayer, Documents, LatentProjection
from caramba.ops.backend import upcast


def mean_l1(predicted: Tensor, target: Tensor, documents: Tensor | None = None) -> Tensor:
    """Mean of |o_s - o_t| in at least fp32; padding, of document -1, is left out.

    Shape: both [B, T, M], documents [B, T] -> [].
    """
    return _mean((upcast(predicted) - upcast(target)).abs(), documents)


def relative_l1(predicted: Tensor, target: Tensor, documents: Tensor | None = None) -> Tensor:
    """Scale-free L1: sum|o_s - o_t| / sum|o_t|, in at least fp32; padding, of document -1, is left out.

    Shape: both [B, T, M], documents [B, T] -> [].
    """
    return mean_l1(predicted, target, documents) / mean_abs(target, documents)


def mean_abs(target: Tensor, documents: Tensor | None = None) -> Tensor:
    """Mean of |o_t|, at least the smallest positive number. Shape: [B, T, M] -> []."""
    wide = upcast(target)
    return _mean(wide.abs(), documents).clamp_min(torch.finfo(wide.dtype).tiny)


def _mean(x: Tensor, documents: Tensor | None) -> Tensor:
    if documents is None:
        return x.mean()
    counted = (documents >= 0)[..., None]
    return (x * counted).sum() / (counted.sum() * x.shape[-1]).clamp_min(1)


def sample_queries(tokens: Tensor, n_queries: int) -> Tensor:
    """Draw `n_queries` positions of each sequence without repetition, all if it has no more.

    They come from torch's CPU generator, which a run seeds and saves, and reach the device without a wait for it.

    Shape: tokens [B, T] -> int64 [B, min(n, T)] on the same device.
    """
    batch, length = tokens.shape
    rows = torch.stack([torch.randperm(length)[:n_queries] for _ in range(batch)])
    return (rows.pin_memory() if tokens.is_cuda else rows).to(tokens.device, non_blocking=True)


class AttentionDivergence(nn.Module):
    """`attention_kl` as a module, so that a compiled step makes one pass over the scores of what here are ten."""

    def forward(self, *given: Any) -> Tensor:
        return attention_kl(*given)


def attention_kl(
    teacher: AttentionLayer,
    student: AttentionLayer,
    teacher_x: Tensor,
    student_x: Tensor,
    rows: Tensor,
    documents: Documents | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the mean KL(A_t || A_s) of attention probabilities in nats.

    The mean is over sequences, heads and the queries at `rows`, of which `counted` excludes padding. Scores are
    [B, H, n, S] at most, never [T, S], and a latent student expands no keys. Both layers need the same number of query
    heads.

    Shape: both inputs [B, T, M], rows int64 [B, n] (see `sample_queries`), counted bool [B, T] -> [].
    """
    with torch.no_grad():
        log_p = attention_log_probabilities(teacher, teacher_x, rows, documents)
    log_q = attention_log_probabilities(student, student_x, rows, documents)
    log_p, log_q = _without_null(teacher, log_p), _without_null(student, log_q)
    # Masked positions are -inf: exclude them from differences and gradients.
    seen = (log_p > float("-inf")) & (log_q > float("-inf"))
    difference = log_p.masked_fill(~seen, 0.0) - log_q.masked_fill(~seen, 0.0)
    per_query = (log_p.exp() * difference).sum(-1)
    if counted is None:
        return per_query.mean()
    kept = counted.gather(1, rows)[:, None]
    return (per_query * kept).sum() / (kept.sum() * per_query.shape[1]).clamp_min(1)


def attention_log_probabilities(
    layer: AttentionLayer, x: Tensor, rows: Tensor, documents: Documents | None = None
) -> Tensor:
    """Log-probabilities of attention from the queries at `rows`, in at least fp32; a null key comes first.

    Shape: x [B, T, M], rows int64 [B, n] -> [B, H, n, T], or [B, H, n, 1 + T] with a null key.
    """
    q, streams = layer.projection(x, 0 if documents is None else documents.positions, rows)
    rule = layer.projection.first if isinstance(layer.projection, LatentProjection) else None
    q_sem = q_first = q
    if rule is not None:
        width = layer.projection.query_dim
        q, q_first = q.split((q.shape[-1] - width, width), dim=-1)
        q_sem = q[..., :width]
    q, k = layer.projection.score_operands(q, streams)
    length = x.shape[1]
    picked = q.unflatten(1, (k.shape[1], -1))
    scores = upcast(torch.einsum("bkgnd,bksd->bkgns", picked, k.to(picked.dtype))).flatten(1, 2)
    places = torch.arange(length, device=x.device)
    if rule is not None:
        exact = rule.scores(q_first, q_sem, streams["k_first"])
        if documents is None:
            scores = torch.cat((exact, scores[..., exact.shape[-1] :]), dim=-1)
        else:
            kept = places - documents.first.gather(1, rows)[:, None, :, None] < rule.n_tokens
            scores = torch.where(kept, exact, scores)
    window = length if layer.score.window is None else layer.score.window
    last = rows[:, None, :, None]
    hidden = (places > last) | (places <= last - window)
    if documents is not None:
        hidden = hidden | (places < documents.first.gather(1, rows)[:, None, :, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.null_k is not None:
        null = layer.null_k.to(picked.dtype).view(k.shape[1], -1)
        null_scores = upcast(torch.einsum("bkgnd,kd->bkgn", picked, null)).flatten(1, 2)
        scores = torch.cat((null_scores[..., None], scores), dim=-1)
    return F.log_softmax(scores, dim=-1)


def _without_null(layer: AttentionLayer, log_probabilities: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens, given that the null key was not chosen."""
    if layer.null_k is None:
        return log_probabilities
    tokens = log_probabilities[..., 1:]
    return tokens - tokens.logsumexp(-1, keepdim=True)


class BlockStep(nn.Module):
    """Run a student's layer and compare it: its output, without gradient, mean |o_s - o_t| and mean |o_t|.

    One module, so that a compiled step reads outputs once for both means and for the signs that the backward needs.

    Shape: x and target [B, T, M], documents [B, T], -1 where padding is left out; output [B, T, M], means [].
    """

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, x: Tensor, target: Tensor, apart: Documents | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, out = self.layer.read(x, apart), self.layer.out
        size = mean_abs(target, documents)
        # In fp16 signs of a whole batch would sum to more than it holds.
        if type(out) is nn.Linear and out.bias is not None and heads.dtype != torch.float16:
            output, raw = _ComparedLinear.apply(heads, out.weight, out.bias, target, documents)  # pyright: ignore[reportGeneralTypeIssues]
            return output.detach(), raw, size
        output = out(heads)
        return output.detach(), mean_l1(output, target, documents), size


class _ComparedLinear(torch.autograd.Function):
    """o = W h + b and mean |o - t|, whose gradient in o is its sign times one number for all elements.

    That number goes where little is to be multiplied, into W and the weight's gradient: the backward reads the signs as
    they are, and no pass over outputs and targets makes a scaled copy of them. o itself gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, bias: Tensor, target: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output = F.linear(heads, weight.to(heads.dtype), bias.to(heads.dtype))
        difference = upcast(output) - upcast(target)
        count = difference.new_full((), difference.numel())
        if documents is not None:
            counted = (documents >= 0)[..., None]
            difference = difference * counted
            count = (counted.sum() * difference.shape[-1]).clamp_min(1).to(difference.dtype)
        ctx.save_for_backward(heads, weight, torch.sign(difference).to(heads.dtype), count)
        ctx.bias_dtype = bias.dtype
        return output, difference.abs().sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, signs, count = ctx.saved_tensors
        scale = grads[1] / count
        rows, grad_weight = signs.flatten(0, -2), None
        grad_heads = (rows @ (weight * scale).to(signs.dtype)).view_as(heads)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ heads.flatten(0, -2)).to(weight.dtype) * scale
        grad_bias = (upcast(rows).sum(0) * scale).to(ctx.bias_dtype)
        return grad_heads, grad_weight, grad_bias, None, None
