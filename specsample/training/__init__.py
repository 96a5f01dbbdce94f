"""Training of drafters: losses, objectives and a step, all pure."""
