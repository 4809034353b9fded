"""Chooses a recipe for each layer of a model, and says why."""
