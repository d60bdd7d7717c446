"""Local forms of operators that communicate inside themselves, by the words of the rules.

Each must issue the collectives of its word in `autopar.sharding.communication`: kind, bytes and
order.
"""
