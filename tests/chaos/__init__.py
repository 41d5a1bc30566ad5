"""A chaos campaign: random kills on a real Slurm, and an oracle that knows what truly ran."""
