"""Training on machines that come and go, in virtual time: recorded or fitted machines, the planner's own decisions."""
