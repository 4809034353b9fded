"""Reinforcement learning whose rollouts have the trainer's log-probabilities."""
