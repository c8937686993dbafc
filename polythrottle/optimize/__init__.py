"""Search methods: constrained Bayesian optimisation and its baselines."""
