"""Mixtures of experts: products of rows in groups, routing, and exchange of tokens."""
