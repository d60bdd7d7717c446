"""MindSpore's automatic parallelism.

Its context becomes arguments of `autopar.plan`, and its strategy checkpoints become restrictions of
the search; plans become strategy checkpoints.
"""
