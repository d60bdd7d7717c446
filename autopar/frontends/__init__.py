"""Frontends: a model, as its framework wrote it, becomes a `Graph`."""
