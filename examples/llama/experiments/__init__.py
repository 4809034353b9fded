"""The training runs and studies behind EXPERIMENTS.md."""
