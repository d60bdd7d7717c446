"""Local forms of operators that communicate inside themselves, each registered under the word that rules use for it.

Each must issue the collectives of its word in `autopar.sharding.communication`: kind, bytes and order.
"""
