"""Partitioning of ops over the devices of a mesh."""
