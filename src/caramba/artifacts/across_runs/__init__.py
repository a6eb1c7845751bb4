"""Runs brought together: states, means over seeds, and comparisons. Torch-free; reads run directories as they are."""
