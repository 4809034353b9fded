"""MaxText with quantized layers; docs/integrations/maxtext.md says how to launch it."""
