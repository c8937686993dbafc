"""What training on transient machines will take: times, speeds, lifetimes, whole jobs; every model scored honestly.

Modules:
    steps baselines scoring   time of a step of a network never seen, and how wrong that is
    speed scaling             a cluster's speed, from its workers' and what they share
    checkpoints startup       what a checkpoint and a replacement take
    survival curves pooled bursts prior     how long machines are kept
    completion                a whole job: seconds, dollars, joules, each with its spread
"""
