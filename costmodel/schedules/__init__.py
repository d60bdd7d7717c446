"""Collective algorithms as schedules of messages: written, executed on numbers, simulated on links, and in closed form."""
