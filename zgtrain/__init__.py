"""Training on verified snapshots, block by block."""
