"""The common parts of the programs that fit constants."""
