"""Training at length: checkpoints, resumable samplers, and an orderly end on a signal."""
