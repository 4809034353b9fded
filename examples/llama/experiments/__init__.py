"""Evidence that it trains: the runs and studies behind EXPERIMENTS.md."""
