"""Trained models for other programs: Hugging Face folders, safetensors, torch files, distributed checkpoints."""

from caramba.export.write import FORMATS as FORMATS
from caramba.export.write import Exported as Exported
from caramba.export.write import export_model as export_model
