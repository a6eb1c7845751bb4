"""Where a run is started: in this process, in a process of its own, by torchrun, or as a SLURM job."""
