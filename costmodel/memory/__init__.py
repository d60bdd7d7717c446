"""Bytes of a device: stored, kept for the backward pass, alive for a moment, and what the allocator takes."""
