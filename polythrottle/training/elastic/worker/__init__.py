"""One worker of an elastic training: its process, its group, its checkpoints, and the context that a script uses."""
