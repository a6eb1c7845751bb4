"""Choice among optimiser strategies within a phase: trials, decisions, safety and their record."""
