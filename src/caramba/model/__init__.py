"""Models: embedder, topology and head built from a spec, and traces of a forward."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.model.custom_layers import check_causal as check_causal
    from caramba.model.early_exit import EarlyExit as EarlyExit
    from caramba.model.model import Head as Head
    from caramba.model.model import Model as Model
    from caramba.model.model import TiedHead as TiedHead
    from caramba.model.model import build_empty as build_empty
    from caramba.model.model import build_model as build_model
    from caramba.model.model import build_with_random_weights as build_with_random_weights
    from caramba.model.model import init_weights as init_weights
    from caramba.model.model import model_hash as model_hash
    from caramba.model.model import pair_attention as pair_attention
    from caramba.model.pretrained import load_hf_folder as load_hf_folder
    from caramba.model.pretrained import load_pretrained as load_pretrained
    from caramba.model.pretrained import save_model as save_model
    from caramba.model.trace import Trace as Trace

__getattr__ = lazy_exports(__name__, __file__)
