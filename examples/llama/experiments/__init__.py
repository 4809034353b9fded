"""The training runs and studies behind docs/evidence/experiments.md."""
