"""The actuator's client: a board set under a lease, or opened in this process where there is no actuator."""
