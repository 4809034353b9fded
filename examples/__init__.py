"""Programs that use the public API only."""
