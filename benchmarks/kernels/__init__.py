"""Tables of measured kernels.

Reading them, holding rows back, and fitting a device's constants to the others.
"""
