"""Who the ranks are: process groups, Slurm, hosts, turns between two runs."""
