"""The seconds of every redistribution of a tensor on a mesh, from each layout to each other one."""
