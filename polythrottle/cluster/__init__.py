"""The same tuning for training nodes that can be taken away: predict, plan, train, fleet, simulate.

    machine lifetime ledger   the values: what is rented, how long it is kept, where joules went
    predict/                  step time, cluster speed, checkpoints, start-up, lifetimes, completion; scored honestly
    plan/                     which machines, how many, which market, which cap, which checkpoint interval
    train/                    elastic data-parallel training behind one small port; checkpoints, sampler, notices
    fleet/                    what nodes learn from each other, and what each may spend on learning
    simulate/                 the same planner, checkpointing and fleet in virtual time

Implements CM-DARE (ICDCS 2020, arXiv 2004.03072) and "Speeding up Deep Learning with Transient Servers" (ICAC 2019,
arXiv 1903.00045), and adds energy.
"""
