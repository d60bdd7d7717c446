"""Tables of measured kernels: how they are read, which rows are held back, and how a device's constants are fitted to the others."""
