"""Reinforcement learning with speculative rollouts: GRPO on sums."""
