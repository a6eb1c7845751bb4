"""Op contracts under `torch.ops.caramba`: schema, reference, fake and a public function each, one file per op."""

from caramba.ops.absorbed_queries import absorbed_queries
from caramba.ops.absorbed_step import absorbed_step
from caramba.ops.adamw import adamw_step
from caramba.ops.argmax_logprob import argmax_logprob
from caramba.ops.backend import (
    METAL_AVAILABLE,
    TRITON_AVAILABLE,
    fused_decode_available,
    get_backend_info,
    has_kernel,
    implementation,
    is_fused,
)
from caramba.ops.cos_sin import cos_sin
from caramba.ops.cross_entropy_rows import cross_entropy_rows
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import StoredStream, dba_decode, kernel_takes
from caramba.ops.dba_decode_up import dba_decode_up
from caramba.ops.decode_arguments import MAX_QUERIES, ZEROS
from caramba.ops.decoupled_attention import decoupled_attention, has_two_part_keys
from caramba.ops.dequantize import dequantize
from caramba.ops.distillation_rows import distillation_rows
from caramba.ops.float8_cast import float8_cast
from caramba.ops.float8_swiglu import float8_swiglu, float8_swiglu_backward
from caramba.ops.foreach_norm import foreach_norm
from caramba.ops.formats import STORED, StoredFormat, get_block_format
from caramba.ops.hadamard import hadamard
from caramba.ops.latent_queries import has_narrow_queries, latent_queries
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.linear_cross_entropy import linear_cross_entropy
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.packed_int4 import WORDS, dequantize_int4, int4_matmul, pack_int4
from caramba.ops.per_head_linear import per_head_linear
from caramba.ops.prompt_lookup_step import prompt_lookup_step
from caramba.ops.quantize import quantize
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import rope
from caramba.ops.rope_cos_sin import rope_cos_sin
from caramba.ops.rope_qkv import rope_qkv
from caramba.ops.sample import draw, sample
from caramba.ops.scale import scale_
from caramba.ops.small_batch_linear import rows_fit, small_batch_linear, weight_fits
from caramba.ops.stochastic_round import stochastic_round
from caramba.ops.store_sample import store_sample
from caramba.ops.store_tokens import store_tokens
from caramba.ops.swiglu import swiglu

__all__ = [
    "MAX_QUERIES",
    "METAL_AVAILABLE",
    "STORED",
    "TRITON_AVAILABLE",
    "WORDS",
    "ZEROS",
    "StoredFormat",
    "StoredStream",
    "absorbed_queries",
    "absorbed_step",
    "adamw_step",
    "add_layer_norm",
    "add_rms_norm",
    "argmax_logprob",
    "cos_sin",
    "cross_entropy_rows",
    "dba_append",
    "dba_decode",
    "dba_decode_up",
    "decoupled_attention",
    "dequantize",
    "dequantize_int4",
    "distillation_rows",
    "draw",
    "float8_cast",
    "float8_swiglu",
    "float8_swiglu_backward",
    "foreach_norm",
    "fused_decode_available",
    "get_backend_info",
    "get_block_format",
    "hadamard",
    "has_kernel",
    "has_narrow_queries",
    "has_two_part_keys",
    "implementation",
    "int4_matmul",
    "is_fused",
    "kernel_takes",
    "latent_queries",
    "layer_norm",
    "linear_cross_entropy",
    "lion_step",
    "norm_dropout_activation",
    "pack_int4",
    "per_head_linear",
    "prompt_lookup_step",
    "quantize",
    "rms_norm",
    "rope",
    "rope_cos_sin",
    "rope_qkv",
    "rows_fit",
    "sample",
    "scale_",
    "small_batch_linear",
    "stochastic_round",
    "store_sample",
    "store_tokens",
    "swiglu",
    "weight_fits",
]
