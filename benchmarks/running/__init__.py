"""The parts of the benchmark of steps: a model, the contenders, and their timing."""
