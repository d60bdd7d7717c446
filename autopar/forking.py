"""Keeps this process able to fork ranks, where that is possible."""

from __future__ import annotations


def keep_forkable() -> None:
    """Start autograd's engine while it sees no device, so that it starts no threads.

    Forked processes would not have these threads.

    The first backward pass of a process starts a thread for each device that torch then sees, and a
    process forked later cannot run a backward pass. Fake tensors make torch see devices that are
    not there. With a real device nothing is done.
    """
    import torch

    if not torch.accelerator.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.ones(1, device="cpu", requires_grad=True)
            one.sum().backward()  # type: ignore[no-untyped-call]
