"""Trained models for other programs: Hugging Face folders, safetensors, torch files, distributed checkpoints."""

from caramba.export.write import FORMATS, Exported, export_model

__all__ = ["FORMATS", "Exported", "export_model"]
