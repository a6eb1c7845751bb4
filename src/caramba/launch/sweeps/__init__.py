"""Sweeps: grids of values, searches by Optuna, and the runner of their points."""
