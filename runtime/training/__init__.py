"""Training at length: checkpoints, resumable samplers, and an orderly end when the machine is taken back."""
