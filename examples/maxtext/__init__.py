"""MaxText with quantized layers; MAXTEXT.md says how it is launched."""
