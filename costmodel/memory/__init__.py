"""Bytes of a device: stored, kept for the backward pass, transient, and the allocator's slack."""
