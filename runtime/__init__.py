"""The runtime: a plan becomes the local program of every rank, and runs."""
