"""The same tuning for training nodes that can be taken away: predict, plan, provision, notices, fleet, simulate.

    catalogue     what can be rented and trained
    recorded_tables    prices, power caps, machines, step times and lifetimes that were recorded
    predict/      step time, cluster speed, checkpoints, lifetimes, completion; each model is scored on unseen networks
    plan/         which machines, how many, which market, which cap, which checkpoint interval, and what a job costs
    rented_machines   from Slurm and SkyPilot, and watched
    notice_sources    what tells that machines are about to be taken away
    fleet         what nodes have learnt from each other, as `cluster fleet` shows it
    job_simulator conditions policy_comparison   the same planner, checkpointing and fleet in virtual time

The training itself is `polythrottle.training.elastic`.

Implements CM-DARE (ICDCS 2020, arXiv 2004.03072) and "Speeding up Deep Learning with Transient Servers" (ICAC 2019,
arXiv 1903.00045), and adds energy.
"""
