"""The outer search: devices used, pipeline stages, meshes, micro-batches, recompute and ZeRO, each candidate solved by `search`."""
