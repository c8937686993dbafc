"""Where machines come from: adapters that ask Slurm, SkyPilot or a simulation for them, and when to ask."""
