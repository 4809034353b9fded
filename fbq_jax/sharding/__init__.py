"""How ops are partitioned over the devices of a mesh."""
