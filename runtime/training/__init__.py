"""Training at length: checkpoints, samplers that go on where they were, and an orderly end when the machine is wanted back."""
