"""Trained models for other programs: Hugging Face folders, safetensors, torch files, distributed checkpoints."""
