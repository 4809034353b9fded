"""The experiments that produced the evidence; not part of the library."""
