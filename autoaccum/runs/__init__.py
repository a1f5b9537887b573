"""What outlives the process: directories of runs, checkpoints, records, and what earlier runs found out."""
