"""Partitions ops over the devices of a mesh."""
