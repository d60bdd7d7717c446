"""Tables of measured kernels: reading them, holding rows back, and fitting a device's constants to the others."""
