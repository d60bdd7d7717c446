"""The memory limit: prices of a byte, bounds at these prices, and methods that close the gap."""
