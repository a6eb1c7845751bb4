"""Hydra config groups: one folder per group, one YAML per option."""
