"""What the benchmark of steps runs: a model, the contenders, and how they are timed and weighed."""
