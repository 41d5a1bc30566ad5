"""``stepfence doctor``: find out, on every node, whether what stepfence relies on is so.

Questions to Slurm (`slurm`), steps on nodes (`steps`, `probe`), and what the answers mean (`storage`, `containers`:
pure). `examination` puts them in order.
"""
