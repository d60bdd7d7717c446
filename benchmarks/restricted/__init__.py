"""Cases of the benchmark of restrictions."""
