"""Inference: opening a trained model, generating text, prefill and decode with a cache, scores of given text."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.config.generate import GenerateConfig as GenerateConfig
    from caramba.config.generate import SpeculativeConfig as SpeculativeConfig
    from caramba.infer.decode import decode_step as decode_step
    from caramba.infer.decode import greedy as greedy
    from caramba.infer.decode import prefill as prefill
    from caramba.infer.eval_text import EvalText as EvalText
    from caramba.infer.generator import Generator as Generator
    from caramba.infer.generator import generate as generate
    from caramba.infer.model_bundle import ModelBundle as ModelBundle
    from caramba.infer.model_bundle import load_model as load_model
    from caramba.infer.scoring import greedy_until as greedy_until
    from caramba.infer.scoring import score_continuations as score_continuations
    from caramba.infer.speculative import SpeculativeGenerator as SpeculativeGenerator
    from caramba.infer.state_file import load_state as load_state
    from caramba.infer.state_file import save_state as save_state

__getattr__ = lazy_exports(__name__, __file__)
