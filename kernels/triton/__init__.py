"""Triton kernels and their plain launchers, by op or family. Imported only by `caramba.kernels.load` on CUDA."""

LAUNCHERS: dict[str, str] = {
    "cross_entropy_rows": "caramba.kernels.triton.cross_entropy_rows:cross_entropy_rows",
    "dba_append": "caramba.kernels.triton.dba_append:dba_append",
    "dba_decode": "caramba.kernels.triton.dba_decode:dba_decode",
    "add_layer_norm": "caramba.kernels.triton.norm:add_layer_norm",
    "add_rms_norm": "caramba.kernels.triton.norm:add_rms_norm",
    "layer_norm": "caramba.kernels.triton.norm:layer_norm",
    "layer_norm_backward": "caramba.kernels.triton.norm:layer_norm_backward",
    "latent_queries": "caramba.kernels.triton.latent_queries:latent_queries",
    "latent_queries_backward": "caramba.kernels.triton.latent_queries:latent_queries_backward",
    "likeliest": "caramba.kernels.triton.likeliest:likeliest",
    "lion_step": "caramba.kernels.triton.lion:lion_step",
    "norm_dropout_activation": "caramba.kernels.triton.norm_dropout_activation:norm_dropout_activation",
    "norm_dropout_activation_backward": "caramba.kernels.triton.norm_dropout_activation:norm_dropout_activation_backward",
    "rms_norm": "caramba.kernels.triton.norm:rms_norm",
    "rms_norm_backward": "caramba.kernels.triton.norm:rms_norm_backward",
    "rope": "caramba.kernels.triton.rope:rope",
    "row_linear": "caramba.kernels.triton.row_linear:row_linear",
    "swiglu": "caramba.kernels.triton.swiglu:swiglu",
    "swiglu_backward": "caramba.kernels.triton.swiglu:swiglu_backward",
    "swiglu_packed": "caramba.kernels.triton.swiglu:swiglu_packed",
    "swiglu_packed_backward": "caramba.kernels.triton.swiglu:swiglu_packed_backward",
    "dequantize": "caramba.kernels.triton.dequantize:dequantize",
    "quantize": "caramba.kernels.triton.quantize:quantize",
}
"""Op -> "module:function" of its launcher; an op that is not here runs its reference."""
