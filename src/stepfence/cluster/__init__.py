"""What Slurm and Pyxis say: the allocation, its nodes and steps, images and mounts."""
