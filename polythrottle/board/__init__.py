"""A board over SSH: what is carried to it, how that is started there, and what it does besides an actuator's work.

`link` packs the actuator, the real backends and the load generator as one zip and has the user's own ``ssh`` start it
in the board's Python; `far_side` is what runs there until the connection ends, and `work_host` its process that runs
workloads and drives windows. `hosted` is a workload there as the desk sees it.
"""
