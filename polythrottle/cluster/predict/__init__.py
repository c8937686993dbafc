"""What training on transient machines will take: times, speeds, lifetimes, whole jobs.

step_times         time of a step and of a checkpoint of a network that was never measured
accuracy           how wrong those predictions are, on networks left out and beside published regressions
lifetimes          how long machines are kept
completion         a cluster's speed, and a whole job: seconds, dollars, joules, each with its spread
"""
