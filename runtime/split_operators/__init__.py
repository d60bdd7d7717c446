"""Local forms of operators that communicate inside themselves, each registered under the word that rules use for it.

What each issues must be what `autopar.sharding.communication` says of the word: kind, bytes and order.
"""
